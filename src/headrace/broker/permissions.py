"""What a caller may do with the topics and subscriptions of this broker.

A :class:`~headrace.access.caller.Caller` decides about names. What a name stands for is known here: the
topics of a subscription, the origins of dead letters, the topic of a message id. Operations
(``administration.py``) and the sessions of the server ask the same questions, so they get the same answers.

Rules:
- To consume from a subscription, seek it or see its messages, a caller needs the right over its name and
  over *every* topic that it is attached to. A member cannot get a part of a subscription's messages.
- A wildcard subscription is attached to those topics that its owner may consume (``Engine.attaches``).
- A topic belongs to the principal that created it: explicitly, or by publishing to it or subscribing to it.
  It counts in this principal's quotas. Topics of administrators and of the broker belong to nobody.
- A dead-letter topic holds messages of other topics. Reading it as a topic takes the right over it and
  over the topics of the subscriptions that bury there; a single letter takes the right over its origin.
- Something that the caller may not see does not exist for it: the answer is "not found", or it is left
  out of a list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.access.caller import Caller
from headrace.access.rights import Right
from headrace.broker.audit import BROKER, IN_PROCESS, Source
from headrace.errors import Conflict, Forbidden, HeadraceError, SubscriptionNotFound, TopicNotFound
from headrace.model import DEAD_LETTER_SUFFIX, DeadLetter, is_pattern
from headrace.operations.declaring import Operation

if TYPE_CHECKING:
    from headrace.broker.engine import Engine
    from headrace.broker.subscription import Subscription


class Permissions(NamedTuple):
    engine: Engine
    caller: Caller
    source: Source = IN_PROCESS

    # --- topics ---------------------------------------------------------------------------------
    def may(self, right: Right, topic: str, name: str | None = None) -> bool:
        caller = self.caller
        if caller.unlimited:
            return True
        if not caller.may(right, topic, name):
            return False
        if right in ("consume", "browse") and topic.endswith(DEAD_LETTER_SUFFIX):
            return all(caller.may(right, origin) for origin in self._origins(topic))
        return True

    def need(self, right: Right, topic: str, name: str | None = None) -> None:
        """Nothing; or :class:`TopicNotFound` for a topic that it may not see, or ``Forbidden``."""
        if self.may(right, topic, name):
            return
        caller = self.caller
        if caller.valid and right in ("consume", "browse") and not caller.sees(topic):
            raise self._no_topic(topic)
        raise caller.refusal(right, topic, name)

    def need_to_see(self, topic: str) -> None:
        if not self.caller.sees(topic):
            if not self.caller.valid:
                raise self.caller.refusal("browse", topic)
            raise self._no_topic(topic)

    def _no_topic(self, topic: str) -> HeadraceError:
        """The same for a topic that exists and for one that does not."""
        return TopicNotFound(
            f"there is no topic {topic[:80]!r}, or {self.caller.name} has no right over it"
        )

    def _origins(self, topic: str) -> set[str]:
        """The topics whose messages are buried in a dead-letter topic."""
        found: set[str] = set()
        for subscription in self.engine.subscriptions():
            for source, _ in subscription.cursors:
                if self.engine.dead_letters.topic_name(subscription, source) == topic:
                    found.add(source)
        return found - {topic}

    def buried(self) -> set[str]:
        """The dead-letter topics of the subscriptions that the caller sees."""
        name_of = self.engine.dead_letters.topic_name
        seen = filter(self.sees, self.engine.subscriptions())
        return {name_of(each, source) for each in seen for source, _ in each.cursors}

    def need_to_follow(self, pattern: str) -> None:
        """A wildcard gets what the caller may consume; a topic that does not exist is created."""
        if is_pattern(pattern):
            self.caller.need("consume")
            return
        self.caller.need("consume", pattern)
        self.need("consume", pattern)
        if self.engine.topics.get(pattern) is None:
            self.need_to_create(pattern, self.engine.topics.defaults.partitions)

    def refusal(self, right: str, topic: str, name: str | None = None) -> HeadraceError:
        return self.caller.refusal(right, topic, name)

    def need_topics(self, right: Right, topics: Any) -> None:
        """Each topic that is named. Wildcards are not refused: they stand for what it may see."""
        for topic in [topics] if isinstance(topics, str) else topics or ():
            if isinstance(topic, str) and not is_pattern(topic):
                self.need(right, topic)

    def need_to_create(self, topic: str, partitions: int = 1) -> None:
        """The quotas for a topic that does not exist yet, or for more partitions."""
        meter = self.caller.meter
        if meter is None or (meter.quotas.topics is None and meter.quotas.partitions is None):
            return
        owner = self.caller.name
        mine = [known for known in self.engine.topics if known.record.owner == owner]
        existing = self.engine.topics.get(topic)
        if existing is None:
            meter.check("topics", len(mine))
        more = partitions - (0 if existing is None else len(existing.partitions))
        if more > 0:
            meter.check("partitions", sum(len(each.partitions) for each in mine) + more - 1)

    @contextmanager
    def owning(self) -> Iterator[None]:
        """Topics that are created inside of it belong to the caller, who is named in the audit.

        Nothing may be awaited there.
        """
        topics, audit = self.engine.topics, self.engine.audit
        topics.owner = None if self.caller.unlimited else self.caller.name
        audit.author = (self.caller.name, self.source)
        try:
            yield
        finally:
            topics.owner, audit.author = None, BROKER

    def check_publish(self, topic: str) -> None:
        """Nothing, or why it may not publish; a topic that passes is remembered by the caller.

        A topic that does not exist is created here and not by the publish: a delayed message would create
        it later, when nobody knows for whom.
        """
        caller = self.caller
        caller.need("publish", topic)
        if self.engine.topics.get(topic) is None:
            self.engine.check_open()
            self.need_to_create(topic, self.engine.topics.defaults.partitions)
            with self.owning():
                self.engine.topic_for_publish(topic)
        if len(caller.publishes) >= PUBLISHES_MAX:
            caller.publishes.clear()
        caller.publishes.add(topic)

    # --- subscriptions ----------------------------------------------------------------------------
    def may_use(self, right: Right, subscription: Subscription) -> bool:
        caller = self.caller
        if caller.unlimited:
            return True
        name = subscription.name
        topics = {topic for topic, _ in subscription.cursors}
        if not topics:
            is_mine = subscription.owner == caller.name and caller.may(right, name=name)
            return is_mine or caller.may_all(right, subscription.pattern, name)
        return all(self.may(right, topic, name) for topic in topics)

    def sees(self, subscription: Subscription) -> bool:
        caller = self.caller
        if caller.unlimited or subscription.owner == caller.name:
            return caller.valid
        topics = {topic for topic, _ in subscription.cursors} or {subscription.pattern}
        return any(caller.sees(topic, subscription.name) for topic in topics)

    def need_to_use(self, right: Right, subscription: Subscription) -> None:
        if not self.may_use(right, subscription):
            raise self.caller.refusal(right, subscription.pattern, subscription.name)

    def subscription(
        self, name: str, topic: str | None = None, right: Right | None = None
    ) -> Subscription:
        """The subscription, if it may be seen and the right over it is there."""
        engine = self.engine
        if self.caller.unlimited:
            return engine.subscription(name, topic)
        if topic is not None:
            one = engine.subscription_or_none(name, topic)
            found = [] if one is None else [one]
        else:
            found = [each for each in engine.subscriptions() if each.name == name]
        found = [each for each in found if self.sees(each)]
        if not found:
            if not self.caller.valid:
                raise self.caller.refusal("consume", topic, name)
            raise SubscriptionNotFound(
                f"there is no subscription {name[:80]!r}, or {self.caller.name} has no right over it"
            )
        if len(found) > 1:
            topics = ", ".join(sorted(each.pattern for each in found))
            raise Conflict(
                f"there are several subscriptions {name!r}, over {topics}: name the topic too",
                code="ambiguous_subscription",
            )
        if right is not None:
            self.need_to_use(right, found[0])
        return found[0]

    def need_group(self, name: str, pattern: str) -> None:
        """Before a subscription is looked up: the answer does not tell whether it exists."""
        if is_pattern(pattern):
            self.caller.need("consume", name=name)
        else:
            self.caller.need("consume", pattern, name)

    def need_to_subscribe(self, name: str, pattern: str, settings: dict[str, Any]) -> None:
        """To create the subscription, or to change it."""
        caller = self.caller
        if caller.unlimited:
            return
        existing = self.engine.subscription_or_none(name, pattern)
        if existing is not None:
            self.need_to_use("consume", existing)
        else:
            self.need_group(name, pattern)
            if not is_pattern(pattern):
                self.need("consume", pattern, name)
        buried_in = settings.get("dead_letter_topic")
        if isinstance(buried_in, str):
            caller.need("publish", buried_in)
            if self.engine.topics.get(buried_in) is None:
                self.need_to_create(buried_in)
        if existing is None:
            if caller.meter is not None and caller.meter.quotas.subscriptions is not None:
                mine = sum(s.owner == caller.name for s in self.engine.subscriptions())
                caller.meter.check("subscriptions", mine)
            if not is_pattern(pattern) and self.engine.topics.get(pattern) is None:
                self.need_to_create(pattern, self.engine.topics.defaults.partitions)

    # --- the rest ---------------------------------------------------------------------------------
    def may_see_letter(self, right: Right, letter: DeadLetter) -> bool:
        return self.caller.may(right, letter.message.topic, letter.subscription)

    def pieces(self, sealed: Iterable[str]) -> list[str]:
        """The ids of staged batches, each for a topic to which the caller may publish."""
        found = []
        for each in sealed:
            piece, topic = self.engine.access.unseal(each)
            if not self.caller.unlimited:
                if topic is None:
                    raise Forbidden(
                        f"{each[:80]!r} is not the id of a batch that this broker staged since it has "
                        "users; stage the batch again"
                    )
                self.caller.need("publish", topic)
            found.append(piece)
        return found

    def check(self, operation: Operation, arguments: dict[str, Any]) -> None:
        """The permission that an operation declares, over what it is about."""
        caller, permission = self.caller, operation.permission
        if caller.unlimited or permission == "none":
            return
        about = None if operation.about is None else arguments.get(operation.about)
        if permission == "see":
            if not caller.valid:
                raise caller.refusal("browse")
            if about is None:
                return  # a list: the implementation leaves out what it may not see
            if operation.about == "topic" and arguments.get("create"):
                caller.need("publish", about)  # as the publish that is to come
            elif operation.about == "topic":
                self.need_to_see(about)
            elif operation.about == "subscription":
                self.subscription(about, arguments.get("topic"))
            elif not caller.sees(name=about):
                raise caller.refusal("browse", name=about)
            return
        if about is None:
            caller.need(permission)
        elif operation.about == "topic":
            self.need(permission, about)
        elif operation.about == "topics":
            caller.need(permission)
            self.need_topics(permission, about)
        elif operation.about == "subscription" and operation.name == "create_subscription":
            self.need_to_subscribe(about, arguments["topic"], arguments["settings"])
        elif operation.letters:  # each letter is checked by its origin, where it is read
            caller.need(permission, name=about.removesuffix(DEAD_LETTER_SUFFIX))
        elif operation.about == "subscription":
            self.subscription(about, arguments.get("topic"), permission)
        else:
            caller.need(permission, name=about)


PUBLISHES_MAX = 10_000
"""Topics that one caller remembers."""
