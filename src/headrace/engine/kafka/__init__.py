"""Partitions in a replicated log that speaks Kafka's protocol. Read ``rule.py`` first: all else follows from it.

``confluent_kafka`` (the extra ``headrace[kafka]``) is imported only here, and only when this engine is used.
"""

from __future__ import annotations

import platform
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import InvalidArgument
from headrace.settings import Settings

if TYPE_CHECKING:
    from headrace.engine.kafka.shared import SharedStorage

_PROPERTY = re.compile(r"[A-Za-z0-9._]+")


def make_storage(settings: Settings) -> Callable[[Any], SharedStorage]:
    """What makes the storage for something with a loop, a clock and a budget, once the settings are known to be good."""
    try:
        import confluent_kafka
    except ImportError:
        raise InvalidArgument(
            "engine kafka needs confluent-kafka; install it with: pip install confluent-kafka",
            code="invalid_setting",
        ) from None
    if not settings.kafka_servers:
        raise InvalidArgument(
            "engine kafka needs kafka_servers, for example k1:9092,k2:9092", code="invalid_setting"
        )
    if not re.fullmatch(r"[A-Za-z0-9_-]+", settings.cluster):
        raise InvalidArgument(
            f"a cluster's name has letters, digits, - and _ only, not {settings.cluster!r}",
            code="invalid_setting",
        )
    if not settings.persistence_enabled:
        raise InvalidArgument(
            "engine kafka keeps messages in Kafka: start without --memory (persistence_enabled)",
            code="invalid_setting",
        )
    options = read_options(settings.kafka_config)
    name = settings.advertise or f"{platform.node()}:{settings.port}"

    def make(engine: Any) -> SharedStorage:
        from headrace.engine.kafka.link import KafkaLink
        from headrace.engine.kafka.shared import SharedStorage

        try:
            link = KafkaLink(
                settings.kafka_servers,
                # A process that is started again is another node to the rule.
                f"{name}/{uuid.uuid4().hex}",
                engine.loop,
                cluster=settings.cluster,
                options=options,
                timeout=settings.kafka_timeout,
            )
        except confluent_kafka.KafkaException as error:
            raise refused_options(settings.kafka_config, error) from None
        return SharedStorage(
            link,
            clock=engine.clock,
            loop=engine.loop,
            budget=engine.budget,
            unsafe=settings.kafka_unsafe,
            slots=settings.slots,
        )

    return make


def read_options(path: str | None) -> dict[str, str]:
    """The properties in a file: name=value on each line; # begins a comment."""
    if path is None:
        return {}
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(
            f"kafka_config {path} cannot be read: {error}", code="invalid_setting"
        ) from None
    found = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and not line.startswith("#"):
            name, equals, value = line.partition("=")
            if not equals or not _PROPERTY.fullmatch(name.strip()):
                # Not the line itself: it may hold a password.
                raise InvalidArgument(
                    f"kafka_config {path}, line {number}: write name=value", code="invalid_setting"
                )
            found[name.strip()] = value.strip()
    return found


def refused_options(path: str | None, error: Exception) -> InvalidArgument:
    """librdkafka does not know a property, or does not take its value. It names the property, and no value of a secret one."""
    return InvalidArgument(
        f"librdkafka refuses the properties in kafka_config {path}: {error.args[0].str()}; correct the file",
        code="invalid_setting",
    )
