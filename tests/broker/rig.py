"""An engine with everything it needs, and the words that the tests of this room use.

Nothing here waits: time passes when a test says so, disk jobs run in the caller's thread, and the
disk is in memory unless a test brings another one.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, cast

from headrace.broker.delivery import Delivery, Member
from headrace.broker.engine import Engine
from headrace.broker.follower import Follower
from headrace.broker.publishing import Publish
from headrace.broker.subscription import Subscription
from headrace.errors import HeadraceError
from headrace.files import Files
from headrace.log.batch import Batch
from headrace.log.columns import Columns, records, time_of
from headrace.log.interface import ReadPending
from headrace.log.partition import PartitionLog
from headrace.model import DeadLetter, Message, PublishManyOptions, Receipt, TopicSettings
from tests.fakes import FakeClock, FakeLoop, InlineWorkers, SimulatedFiles, SlowStorage

DATA = Path("data")
TOPIC = "orders"
GROUP = "billing"


class Inbox:
    """A sink that keeps what it gets, and refuses nothing unless ``space`` says so."""

    def __init__(self, space: int = 1_000_000_000):
        self.space = space
        self.deliveries: list[Delivery] = []
        self.messages: list[Message] = []
        self.ends: list[HeadraceError | None] = []
        self.member: Member | None = None
        self.subscription: Subscription | None = None
        self.follower: Follower | None = None

    # --- what the engine sees ---------------------------------------------------------------
    def room(self) -> int:
        return self.space

    def deliver(self, delivery: Delivery) -> None:
        self.deliveries.append(delivery)
        self.messages += delivery.messages(self)

    def closed(self, error: HeadraceError | None) -> None:
        self.ends.append(error)

    # --- what the test says -----------------------------------------------------------------
    @property
    def values(self) -> list[bytes]:
        return [message.value for message in self.messages]

    @property
    def offsets(self) -> list[int]:
        return [message.offset for message in self.messages]

    @property
    def attempts(self) -> list[int]:
        return [message.attempt for message in self.messages]

    def take(self) -> list[Message]:
        """What has come since the last call."""
        taken, self.messages = self.messages, []
        self.deliveries.clear()
        return taken

    def ack(self, *messages: Message) -> None:
        assert self.subscription is not None
        for message in messages:
            self.subscription.ack(message.lease.id, message.offset)

    def nack(
        self, message: Message, delay: float | None = None, reason: str = "does not fit"
    ) -> None:
        assert self.subscription is not None
        self.subscription.nack(message.lease.id, message.offset, delay, reason)

    def extend(self, message: Message, seconds: float | None = None) -> None:
        assert self.subscription is not None
        self.subscription.extend(message.lease.id, seconds)

    def leave(self, *, count_attempt: bool = True) -> None:
        assert self.subscription is not None
        assert self.member is not None
        self.subscription.leave(self.member, count_attempt=count_attempt)


class Answer:
    """What a call was answered with; ``value`` or ``error``, and nothing before it came."""

    def __init__(self) -> None:
        self.calls = 0
        self.value: Any = None
        self.error: HeadraceError | None = None

    def done(self, *given: Any) -> None:
        *values, self.error = given
        self.value = values[0] if len(values) == 1 else tuple(values)
        self.calls += 1

    def get(self) -> Any:
        assert self.calls == 1, f"answered {self.calls} times"
        if self.error is not None:
            raise self.error
        return self.value


class Rig:
    """A loop, a clock, workers and a disk, and the engine that is opened over them."""

    slow = False
    """Whether every log completes its reads later (``test_slow_log.py``)."""

    def __init__(
        self,
        files: Files | None = None,
        directory: Path | None = DATA,
        *,
        seed: int = 0,
        hold: bool = False,
        topic: dict[str, Any] | None = None,
        **options: Any,
    ):
        self.files: Files = files if files is not None else SimulatedFiles()
        self.directory = directory
        self.random = Random(seed)
        self.loop = FakeLoop()
        self.clock = FakeClock(self.loop)
        self.workers = InlineWorkers(self.loop, hold=hold)
        self.options = {"topic_defaults": TopicSettings(**(topic or {})), **options}
        self.failures: list[HeadraceError] = []
        self._engine: Engine | None = None

    # --- the engine's life ------------------------------------------------------------------
    @property
    def engine(self) -> Engine:
        if self._engine is None:
            self.open()
        assert self._engine is not None
        return self._engine

    def make(self) -> Engine:
        """An engine that is not open yet."""
        engine = Engine(
            self.directory,
            self.loop,
            files=self.files,
            clock=self.clock,
            random=Random(self.random.random()),
            workers=self.workers,
            on_failed=self.failures.append,
            **self.options,
        )
        if self.slow:
            engine.topics.storage = SlowStorage(engine.topics.storage, self.loop)
        return engine

    def open(self) -> Engine:
        engine = self.make()
        engine.open()
        self._engine = engine
        self.run()
        return engine

    def close(self) -> None:
        closed: list[bool] = []
        self.engine.close(lambda: closed.append(True))
        self.run()
        assert closed == [True], "the engine did not close"
        self._engine = None

    def abandon(self) -> None:
        """Forget the engine as a killed process would: nothing is flushed, told or cut."""
        self._engine = None
        now = self.clock.now_ms()
        self.loop = FakeLoop(self.loop.time())
        self.clock = FakeClock(self.loop, now)
        self.workers = InlineWorkers(self.loop, hold=self.workers.hold)

    def reopen(self) -> Engine:
        self.close()
        return self.open()

    def kill(self) -> Engine:
        """The process ends, the machine goes on; then it is started again."""
        self.abandon()
        self.disk.kill()
        return self.open()

    def crash(self, random: Random | None = None, **how: Any) -> Engine:
        """The power fails; then it is started again."""
        self.abandon()
        self.disk.crash(random or self.random, **how)
        return self.open()

    @property
    def disk(self) -> SimulatedFiles:
        inner = getattr(self.files, "inner", self.files)
        assert isinstance(inner, SimulatedFiles)
        return inner

    # --- time -------------------------------------------------------------------------------
    def run(self) -> None:
        self.loop.run_until_idle()

    def advance(self, seconds: float) -> None:
        self.loop.advance(seconds)

    # --- asking and being answered ------------------------------------------------------------
    def ask(self, call: Callable[..., Any], *args: Any, **more: Any) -> Answer:
        """Call with ``done`` as the last argument; nothing happens until the loop runs."""
        answer = Answer()
        self.complete(lambda: call(*args, answer.done, **more))
        return answer

    def complete(self, read: Callable[[], Any]) -> Any:
        """Call again, after the loop has run, for as long as a log still fetches."""
        while True:
            try:
                return read()
            except ReadPending:
                self.run()

    def wait(self, call: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """Call, let the loop run, and give what the answer was, or raise it."""
        answer = self.ask(call, *args, **more)
        self.run()
        return answer.get()

    def flush(self) -> None:
        self.wait(self.engine.state.flush)

    # --- publishing -------------------------------------------------------------------------
    def columns(self, values: Iterable[bytes | str], **more: Any) -> Columns:
        headers, options = more.pop("headers", None), cast(PublishManyOptions, more)
        bytes_max, now = self.engine.max_message_size, self.clock.now_ms()
        return records(list(values), headers, options, bytes_max, now)

    def send(self, topic: str, *values: bytes | str, **more: Any) -> Answer:
        """Publish without waiting for the answer."""
        placing = {
            name: more.pop(name) for name in ("partition", "producer", "deliver_at") if name in more
        }
        delay = more.pop("delay", None)
        if delay is not None:
            placing["deliver_at"] = time_of(delay, None, self.clock.now_ms())
        return self.offer(topic, self.columns(values, **more), **placing)

    def offer(self, topic: str, records: Columns | Batch, **placing: Any) -> Answer:
        """Publish checked records without waiting for the answer."""
        return self.ask(self.engine.publish, Publish(topic, records, **placing))

    def publish_all(self, topic: str, *values: bytes | str, **more: Any) -> list[Receipt]:
        answer = self.send(topic, *values, **more)
        self.run()
        receipts: list[Receipt] = answer.get()
        return receipts

    def publish(self, topic: str, *values: bytes | str, **more: Any) -> Receipt:
        return self.publish_all(topic, *values, **more)[0]

    def numbers(self, count: int, topic: str = TOPIC, start: int = 0, **more: Any) -> Receipt:
        """Publish ``b"0"``, ``b"1"``, …"""
        return self.publish(topic, *(b"%d" % n for n in range(start, start + count)), **more)

    # --- consuming --------------------------------------------------------------------------
    def subscribe(self, name: str = GROUP, topic: str = TOPIC, **more: Any) -> Subscription:
        start = {key: more.pop(key) for key in ("start", "start_time_ms") if key in more}
        answer = Answer()
        subscription: Subscription = self.complete(
            lambda: self.engine.subscribe(name, topic, settings=more, done=answer.done, **start)
        )
        self.run()
        answer.get()
        return subscription

    def join(
        self,
        subscription: Subscription | None = None,
        prefetch: int = 500,
        *,
        name: str = "member",
        auto_ack: bool = False,
        space: int = 1_000_000_000,
    ) -> Inbox:
        subscription = subscription or self.engine.subscription(GROUP)
        inbox = Inbox(space)
        inbox.subscription = subscription
        inbox.member = Member(name, inbox, prefetch, auto_ack)
        subscription.join(inbox.member)
        self.run()
        return inbox

    def follow(self, pattern: str = TOPIC, space: int = 1_000_000_000) -> Inbox:
        inbox = Inbox(space)
        inbox.follower = self.engine.follow(pattern, inbox)
        self.run()
        return inbox

    # --- looking ----------------------------------------------------------------------------
    def log(self, topic: str = TOPIC, partition: int = 0) -> Any:
        return self.engine.partition(topic, partition).log

    def read(self, topic: str = TOPIC, partition: int = 0) -> list[Message]:
        """Everything there is, as the log has it."""
        log = self.log(topic, partition)
        found: list[Message] = []
        offset = log.start_offset
        while offset < log.end_offset:
            for batch in self.complete(partial(log.read, offset)):
                found += batch.messages(topic, partition, offset - batch.base_offset, batch.count)
                offset = batch.end_offset
        return found

    def values(self, topic: str = TOPIC, partition: int = 0) -> list[bytes]:
        return [message.value for message in self.read(topic, partition)]

    def letters(self, name: str = GROUP, **more: Any) -> list[DeadLetter]:
        return self.complete(lambda: self.engine.dead_letters.letters(name, **more))

    def segments(self, topic: str = TOPIC, partition: int = 0) -> list[int]:
        """The base offsets of the segments on disk."""
        assert self.directory is not None
        names = self.files.names(self.directory / topic / str(partition))
        return [int(name[:20]) for name in names if name.endswith(".log")]

    def roll(self, topic: str = TOPIC, partition: int = 0) -> None:
        """Close the segment that is written, as its age would."""
        log = self.log(topic, partition)
        log = getattr(log, "_log", log)  # of a slow one, the one on disk
        assert isinstance(log, PartitionLog)
        log._lane.put("roll")
        self.run()


def damage(rig: Rig, path: Path, change: Callable[[bytearray], None]) -> None:
    """Change the bytes of a file on the simulated disk."""
    content = bytearray(rig.files.read_file(path))
    change(content)
    rig.disk.put(path, content)


def flip(at: int) -> Callable[[bytearray], None]:
    def change(content: bytearray) -> None:
        content[at] ^= 0xFF

    return change
