"""What both directions share: sessions that begin where the output ends, again and again until the bridge is stopped.

A *session* opens its positions and copies round after round. An error that may pass (Kafka or the broker is away) ends the
session, and the next one begins as after a crash, so there is one way of recovery. In the first session, such an
error ends the bridge: an address is more often wrong than away.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import ClassVar

from headrace.bridge.kafka import KafkaPlace
from headrace.bridge.routes import BridgeProgress, BridgeRoute
from headrace.client.threads import BrokerClient
from headrace.errors import BrokerFailed, Closed, HeadraceError, OutcomeUnknown

logger = logging.getLogger("headrace.bridge")
RETRY_S = 1.0
LOOK_S = 30.0
"""How often a session looks for new partitions."""
UNCOPIED = "before they were copied; to go on without them, start with --skip deleted"
TOLD_MAX = 20
"""Skipped messages that are named one by one; after that, every thousandth."""


class Reopen(Exception):
    """Something has changed, such as the number of partitions: begin the next session."""


class Bridge:
    _gone: ClassVar[str]
    """What is said of records that were deleted before they were copied."""

    def __init__(
        self,
        client: BrokerClient,
        place: KafkaPlace,
        routes: Sequence[BridgeRoute],
        name: str,
        *,
        start: str = "earliest",
        skips: frozenset[str] = frozenset(),
        stop: threading.Event | None = None,
    ):
        self._client = client
        self._place = place
        self._name = name
        self._start = start
        self._skips = skips
        self.stop = stop or threading.Event()
        self.progress = BridgeProgress(routes)
        place.on_trouble = self._trouble

    def _trouble(self, text: str) -> None:
        self.progress.trouble = text

    def run(self, *, until_caught_up: bool = False) -> None:
        """Copy until ``stop`` is set, or everything that exists is copied."""
        has_run = False
        while not self.stop.is_set():
            try:
                try:
                    self.progress.is_caught_up = False
                    self._open()
                    has_run = True
                    self.progress.trouble = None
                    while not self.stop.is_set():
                        self._round()
                        if until_caught_up and self.progress.is_caught_up:
                            return
                finally:
                    self._close()
            except Reopen as reason:
                logger.info("%s", reason)
            except HeadraceError as error:
                if not has_run or not _may_pass(error):
                    raise
                self.progress.trouble = f"{error.message.rstrip('.')}. Trying again"
                logger.warning("%s", self.progress.trouble)
                self.stop.wait(RETRY_S)

    def _open(self) -> None:
        """Find out where to continue."""
        raise NotImplementedError

    def _round(self) -> None:
        """Copy some messages, or wait a moment for them."""
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError

    def _after_gap(self, route: BridgeRoute, place: str, at: int, first: int) -> int:
        """Where to go on if the records before ``first`` were deleted."""
        if at < first:
            where = f"offsets {at} to {first - 1} of {place}"
            self._skip("deleted", route, where, first - at, self._gone, self._deleted(where))
        return max(at, first)

    def _deleted(self, where: str) -> HeadraceError:
        raise NotImplementedError

    def _skip(
        self,
        kind: str,
        route: BridgeRoute,
        where: str,
        count: int,
        why: str,
        refusal: HeadraceError,
    ) -> None:
        """Go on without these records; raises ``refusal`` unless ``--skip`` names this kind."""
        if kind not in self._skips:
            raise refusal from None
        route.skipped += count
        skipped = self.progress.skipped
        if skipped <= TOLD_MAX or skipped % 1000 < count:
            logger.warning("skipped %s: %s", where, why)


def _may_pass(error: HeadraceError) -> bool:
    return error.retryable or isinstance(error, (OutcomeUnknown, Closed, BrokerFailed))
