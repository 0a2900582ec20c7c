"""Where an operation runs, and how the answers of several nodes become one.

Each operation declares it (``runs=``). Every node knows all topics and subscriptions and can read all partitions, so most of them
run where they arrive, and need only to be up to date (``Node.fresh``). What only an owner knows is asked of owners: what is delayed,
staged or reported of the node that leads, dead letters of the owner of their topic, one message's life of the owner of its
partition. Positions, lags and all that is counted in deliveries are asked of every node, and the answers are added up (``JOINED``).

Slots move. So the node that is asked looks whether it is the owner, and refuses with ``partition_moved`` if it is not: nothing was done, and the
first node looks for the owner again. A node that is just taking slots answers when it has them.
A node that cannot be reached makes a change fail; what is only read is answered without it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_args

from headrace.broker import schedule
from headrace.broker.administration import Administration
from headrace.broker.explaining import worst_first
from headrace.broker.slots import moved
from headrace.cluster.peers import NO_ANSWER, Peer, unanswered
from headrace.errors import HeadraceError, InvalidArgument, OutcomeUnknown, StorageFailed
from headrace.model import DEAD_LETTER_SUFFIX, is_pattern, split_id
from headrace.operations.cluster_catalog import NodeStatus
from headrace.operations.declaring import Operation
from headrace.operations.results import Verdict
from headrace.wire.binary import Type

if TYPE_CHECKING:
    from headrace.cluster.node import Node

logger = logging.getLogger("headrace.cluster")
Join = Callable[[list[Any], dict[str, Any]], Any]
LOOK_AGAIN_S = 0.02
STATUS_S = 2.0
"""A node that does not say for so long how it is counts as one that cannot be reached."""
LONG_S = 600.0
LONG = frozenset({"redrive", "redrive_progress", "stop_redrive", "commit_staged", "begin_backup"})
"""Operations that are answered when they are done."""
OF_THE_NODE = frozenset({"whoami", "info", "history"})
"""About this node alone: answered also while Kafka is away."""
CHANGES = frozenset({"flush", "seek", "advance"})


class Routing:
    def __init__(self, node: Node):
        self._node = node

    async def call(
        self, administration: Administration, operation: Operation, checked: dict[str, Any]
    ) -> Any:
        node = self._node
        if operation.method == "cluster_status":
            return await self._status(administration, operation)
        if operation.method in OF_THE_NODE:
            return await administration.here(operation, checked)
        await node.fresh(_topics(checked))
        place = self._place(operation, checked)
        if place is not None:
            return await self._at_owner(place, administration, operation, checked)
        if operation.runs == "named node":
            peer = self._named(checked["node"])
            if peer is not None:
                return await self._ask(peer, administration, operation, checked)
        elif operation.runs == "every node":
            if operation.method == "send_reply":
                return await self._reply(administration, operation, checked)
            if operation.method == "topic_stats" and checked.get("create"):
                await node.ensure(checked["topic"])
            began = node.loop.time()
            answer = await self._everywhere(administration, operation, checked)
            if operation.method == "flush":
                node.flushed(administration.source, began)
            return answer
        return await administration.here(operation, checked)

    async def accept(self, operation: Operation, checked: dict[str, Any]) -> None:
        """Another node asks: :class:`StorageFailed` unless this is the node to ask."""
        if operation.method != "cluster_status":
            await self._node.settled()
        place = self._place(operation, checked)
        if place is not None and self._node.owner_of(*place) != self._node.address:
            raise moved()

    # --- where --------------------------------------------------------------------------------
    def _place(self, operation: Operation, checked: dict[str, Any]) -> tuple[str, int] | None:
        """The partition whose owner carries it out."""
        if operation.runs == "leader":
            return schedule.TOPIC, 0
        if operation.runs == "owner of letters":
            return self._place_of_letters(checked["subscription"])
        if operation.runs == "owner of message":
            if "id" not in checked:
                return checked["topic"], checked["partition"]
            parts = split_id(checked["id"])
            topic = None if parts is None else self._node.engine.topics.by_hash(parts[0])
            if parts is not None and topic is not None and parts[1] < len(topic.partitions):
                return topic.name, parts[1]
        return None

    def _place_of_letters(self, name: str) -> tuple[str, int] | None:
        engine = self._node.engine
        candidates = [name, name + DEAD_LETTER_SUFFIX]
        for subscription in engine.subscriptions():
            if subscription.name == name and subscription.settings.dead_letter_topic:
                candidates.insert(0, subscription.settings.dead_letter_topic)
        for candidate in candidates:
            if engine.topics.get(candidate) is not None and (
                candidate != name or candidate.endswith(DEAD_LETTER_SUFFIX)
            ):
                return candidate, 0
        return None

    def _named(self, name: str) -> Peer | None:
        if name == self._node.address:
            return None
        if name not in self._node.nodes():
            known = ", ".join(sorted({self._node.address, *self._node.nodes()}))
            raise InvalidArgument(f"there is no node {name!r}; there are {known}")
        return self._node.peers.get(name)

    # --- asking -------------------------------------------------------------------------------
    async def _at_owner(
        self,
        place: tuple[str, int],
        administration: Administration,
        operation: Operation,
        checked: dict[str, Any],
    ) -> Any:
        node = self._node
        deadline = node.loop.time() + node.timeout
        while True:
            owner = await node.wait_for_owner(*place)
            try:
                if owner == node.address:
                    return await administration.here(operation, checked)
                return await self._ask(node.peers.get(owner), administration, operation, checked)
            except StorageFailed as error:
                if error.code != "partition_moved" or node.loop.time() > deadline:
                    raise
            except NO_ANSWER as error:
                if owner == node.address:
                    raise
                if not operation.repeatable:
                    raise unanswered(operation.name) from error
                if node.loop.time() > deadline:
                    raise StorageFailed(
                        f"node {owner} does not answer; try again", code="no_owner"
                    ) from error
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _ask(
        self,
        peer: Peer,
        administration: Administration,
        operation: Operation,
        checked: dict[str, Any],
    ) -> Any:
        given = {name: value for name, value in checked.items() if value is not None}
        properties = {"forwarded": "true"}
        if not administration.caller.unlimited:
            properties["caller"] = administration.caller.name
        timeout = LONG_S if operation.name in LONG else self._node.timeout
        if operation.name == "cluster_status":
            timeout = STATUS_S
        frame = await peer.ask(Type.ADMIN, properties, operation.encode(given), timeout=timeout)
        return operation.decode(frame.body)

    async def _flush(
        self,
        peer: Peer,
        administration: Administration,
        operation: Operation,
        checked: dict[str, Any],
    ) -> None:
        sent = peer.acks_sent
        if not peer.is_up and sent == peer.acks_stored:
            return  # it has no acks of ours: those that were not stored when it was lost are counted as lost
        try:
            await self._ask(peer, administration, operation, checked)
        except OutcomeUnknown:  # of acks that may have come from any client of this node
            self._node.losses.lost()
            raise
        peer.acks_stored = max(peer.acks_stored, sent)

    async def _everywhere(
        self,
        administration: Administration,
        operation: Operation,
        checked: dict[str, Any],
    ) -> Any:
        """Here and at every other node."""
        node = self._node
        await node.settled()
        asked: list[Any] = [self._here(administration, operation, checked)]
        for address in node.nodes():
            given = checked
            if operation.method == "advance":
                given = {**checked, "positions": self._of_owner(checked["positions"], address)}
                if not given["positions"]:
                    continue
            ask = self._flush if operation.method == "flush" else self._ask
            asked.append(ask(node.peers.get(address), administration, operation, given))
        answers: list[Any] = await asyncio.gather(*asked, return_exceptions=True)
        errors = [each for each in answers if isinstance(each, BaseException)]
        good = [each for each in answers if not isinstance(each, BaseException)]
        if operation.method == "seek" and good:  # a node may have none of the partitions
            errors = [each for each in errors if not isinstance(each, InvalidArgument)]
        for error in errors:
            if not isinstance(error, HeadraceError):
                raise error
        if errors and (not good or operation.method in CHANGES):
            raise errors[0]
        return JOINED[operation.method](good, checked)

    async def _here(
        self, administration: Administration, operation: Operation, checked: dict[str, Any]
    ) -> Any:
        if operation.method == "advance":
            mine = self._of_owner(checked["positions"], self._node.address)
            if not mine and checked["positions"]:
                return None
            checked = {**checked, "positions": mine}
        if operation.method == "flush":
            await self._node.settled_elsewhere()
        return await administration.here(operation, checked)

    def _of_owner(self, positions: dict[str, dict[int, int]], address: str) -> dict[str, Any]:
        """The part of positions that a node has the partitions of; this node also what nobody has."""
        found: dict[str, Any] = {}
        for topic, some in positions.items():
            mine = {
                number: offset
                for number, offset in some.items()
                if (self._node.owner_of(topic, number) or self._node.address) == address
            }
            if mine:
                found[topic] = mine
        return found

    async def _reply(
        self, administration: Administration, operation: Operation, checked: dict[str, Any]
    ) -> bool:
        if await administration.here(operation, checked):
            return True
        asked = [
            self._ask(self._node.peers.get(address), administration, operation, checked)
            for address in self._node.nodes()
        ]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return any(answer is True for answer in answers)

    async def _status(self, administration: Administration, operation: Operation) -> Any:
        """Of all nodes, also of those that cannot be reached."""
        node, others = self._node, sorted(self._node.nodes())
        found = await administration.here(operation, {})
        asked = [self._ask(node.peers.get(each), administration, operation, {}) for each in others]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for address, answer in zip(others, answers, strict=True):
            if isinstance(answer, BaseException):
                if not isinstance(answer, HeadraceError):
                    raise answer
                found["nodes"].append(_unreachable(address))
            else:
                found["nodes"] += answer["nodes"]
                found["owners"] += [each for each in answer["owners"] if each["node"] is not None]
        found["nodes"].sort(key=lambda each: each["node"])
        owned = {each["slot"]: each for each in found["owners"] if each["node"] is not None}
        nobody = {"node": None, "partitions": 0, "lag": 0}
        slots = range(found["slots"])
        found["owners"] = [owned.get(slot) or {"slot": slot, **nobody} for slot in slots]
        found["missing"] = [slot for slot in slots if slot not in owned]
        return found


def _unreachable(address: str) -> NodeStatus:
    return {
        "node": address,
        "reachable": False,
        "slots": [],
        "drained": False,
        "partitions": 0,
        "connections": 0,
        "lag": 0,
        "moves": 0,
        "kafka_away": False,
    }


def _topics(checked: dict[str, Any]) -> tuple[str, ...]:
    found: list[Any] = []
    for name in ("topic", "topics"):
        value = checked.get(name)
        found += [value] if isinstance(value, str) else (value or [])
    found += list(checked.get("positions") or ())
    return tuple(each for each in found if isinstance(each, str) and not is_pattern(each))


# --- joining ----------------------------------------------------------------------------------------
def _add(into: dict[str, Any], other: dict[str, Any], keep: frozenset[str]) -> None:
    """Add up the numbers of another node, besides those that are the same everywhere."""
    for name, value in other.items():
        known = into.get(name)
        if name == "verdict" and _VERDICTS.index(value) > _VERDICTS.index(known or "ok"):
            into[name] = value
        if name in keep or isinstance(value, bool) or type(value) not in (int, float, list):
            continue
        if known is not None:
            into[name] = known + value


_VERDICTS: tuple[str, ...] = get_args(Verdict)
"""The worst one of all nodes holds; it stands last."""
_SAME = frozenset({"created", "settings", "outcome", "topic", "name", "subscription"})


def _one(answers: list[Any], checked: dict[str, Any]) -> Any:
    total = answers[0]
    for other in answers[1:]:
        _add(total, other, _SAME)
    if isinstance(total.get("partitions"), list):
        total["partitions"].sort(key=lambda each: (each.get("topic", ""), each["partition"]))
    return total


def _by(*names: str, add: frozenset[str] | None = None) -> Callable[[list[list[Any]]], list[Any]]:
    """Lists of things that several nodes know a part of: those with the same names are one."""

    def join(lists: list[list[Any]]) -> list[Any]:
        found: dict[tuple[Any, ...], dict[str, Any]] = {}
        for each in lists:
            for item in each:
                key = tuple(item.get(name) for name in names)
                if key not in found:
                    found[key] = item
                elif add is None:
                    _add(found[key], item, _SAME)
                else:
                    for name in add:
                        found[key][name] += item[name]
        return list(found.values())

    return join


def _rows(join: Callable[[list[list[Any]]], list[Any]]) -> Join:
    def joined(answers: list[Any], checked: dict[str, Any]) -> Any:
        rows = join([answer["rows"] for answer in answers])
        sort = checked.get("sort")
        if sort:
            rows.sort(key=lambda row: row[sort], reverse=bool(checked.get("descending")))
        total = max(answer.get("total", 0) for answer in answers)
        return {**answers[0], "total": total, "rows": rows[: checked["limit"]]}

    return joined


def _overview(answers: list[Any], checked: dict[str, Any]) -> Any:
    first = answers[0]
    rows = _by("topic", "subscription")([answer["rows"] for answer in answers])
    for other in answers[1:]:
        _add(first, {name: v for name, v in other.items() if name != "rows"}, _EVERYWHERE)
    return {**first, "rows": rows[: checked["limit"]]}


_EVERYWHERE = _SAME | {"topics", "subscriptions", "published", "bytes", "time", "rows", "messages"}


def _topic(answers: list[Any], checked: dict[str, Any]) -> Any:
    answers[0]["backlog"] = sum(answer["backlog"] for answer in answers)
    return answers[0]


def _explanation(answers: list[Any], checked: dict[str, Any]) -> Any:
    order = ("stuck", "slow", "working", "idle")
    answers.sort(key=lambda answer: order.index(answer["state"]))
    first = answers[0]
    for other in answers[1:]:
        first["members"] += other["members"]
        first["retries"] += other["retries"]
        first["members_total"] += other["members_total"]
        first["retries_total"] += other["retries_total"]
        known = {each["text"] for each in first["findings"]}
        if other["state"] == first["state"]:
            first["findings"] += [each for each in other["findings"] if each["text"] not in known]
        first["oldest"] = first["oldest"] or other["oldest"]
    return first


def _letters(answers: list[Any], checked: dict[str, Any]) -> Any:
    most: dict[str, int] = {}
    for answer in answers:
        for each in answer:
            most[each["topic"]] = max(most.get(each["topic"], 0), each["letters"])
    return [{"topic": topic, "letters": count} for topic, count in sorted(most.items())]


def _concerns(answers: list[Any], checked: dict[str, Any]) -> Any:
    found = {each["text"]: each for answer in answers for each in answer}
    return worst_first([*found.values()])[: checked["limit"]]


def _nothing(answers: list[Any], checked: dict[str, Any]) -> None:
    return None


JOINED: dict[str, Join] = {
    "flush": _nothing,
    "advance": _nothing,
    "seek": _one,
    "preview_seek": _one,
    "subscription_stats": _one,
    "subscriptions": lambda answers, checked: _by("topic", "name")(answers),
    "topic_stats": _topic,
    "list_topics": lambda answers, checked: _by("topic", add=frozenset({"backlog"}))(answers),
    "topic_table": _rows(_by("topic", add=frozenset({"backlog"}))),
    "subscription_table": _rows(_by("topic", "subscription")),
    "overview": _overview,
    "clients": lambda answers, checked: [each for answer in answers for each in answer][
        : checked["limit"]
    ],
    "topic_publishers": lambda answers, checked: sorted(
        (each for answer in answers for each in answer), key=lambda each: -each["last"]
    )[: checked["limit"]],
    "attention": _concerns,
    "explain_subscription": _explanation,
    "dead_letter_topics": _letters,
}
