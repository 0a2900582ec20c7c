"""What a node sends to the owner of a partition, and what it does with the answers. The test is the owner."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from headrace import limits
from headrace.broker.clustering import ClusterFigures
from headrace.cluster.forwarding import ForwardQueue
from headrace.errors import Conflict, HeadraceError, SequenceGap, StorageFailed, TooLarge
from headrace.log.batch import Batch, encode, parse
from headrace.log.columns import Columns
from headrace.log.interface import Append
from headrace.wire.binary import Frame
from tests.client.rig import run


class Sent:
    """A batch that the owner got."""

    def __init__(self, properties: dict[str, str], body: bytes, answer: Callable[..., None]):
        batch = parse(body)
        assert batch is not None
        self.batch: Batch = batch
        self.only_repeated = properties.get("only_repeated") == "true"
        self._answer = answer

    @property
    def values(self) -> list[bytes]:
        return self.batch.values()

    def store(self, offset: int) -> None:
        self._answer(Frame(0, 0, {"offset": str(offset), "timestamp": "1"}), None)

    def refuse(self, error: HeadraceError) -> None:
        self._answer(None, error)

    def lose(self) -> None:
        self._answer(None, None)


class Owner:
    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.is_up = True
        peer = SimpleNamespace(is_up=True, on_up={}, send=self._send)
        node: Any = SimpleNamespace(
            loop=asyncio.get_running_loop(),
            timeout=30.0,
            address="a:1",
            peers=SimpleNamespace(get=lambda address: peer),
            figures=ClusterFigures(),
        )
        log: Any = SimpleNamespace(
            about=("orders", 0), owned=False, replica=SimpleNamespace(owner="b:1/x")
        )
        self.queue = ForwardQueue(node, log)
        self.results: dict[bytes, int | str] = {}

    def _send(self, type: int, properties: dict[str, str], body: bytes, answer: Any) -> None:
        self.sent.append(Sent(properties, body, answer))

    def put(
        self,
        value: bytes,
        *,
        whole: bool = True,
        times: list[int] | None = None,
        refusal: HeadraceError | None = None,
    ) -> None:
        """A batch of a client, or a plain record. One with a refusal has a producer."""

        def done(entry: Append) -> None:
            assert value not in self.results, f"{value!r} was answered twice"
            self.results[value] = entry.error.code if entry.error else entry.first_offset

        columns = Columns([value], times=times)
        entry = Append(columns, None, done)
        if whole:
            entry = Append(None, encode(columns), done)
        if refusal is not None:
            entry.producer_id, entry.refusal = 7, refusal
        self.queue.put(entry)

    async def got(self) -> list[Sent]:
        for _ in range(5):
            await asyncio.sleep(0)
        taken, self.sent = self.sent, []
        return taken


@run
async def test_batches_without_a_producer_leave_together() -> None:
    """Numbered one after the other, and no more than an owner remembers."""
    owner = Owner()
    for number in range(7):
        owner.put(b"%d" % number)
    first = await owner.got()
    assert len(first) == limits.PRODUCER_BATCHES_KEPT == 5
    assert [each.batch.first_sequence for each in first] == [0, 1, 2, 3, 4]
    assert len({each.batch.producer_id for each in first}) == 1
    for at, each in enumerate(first):
        each.store(at)
    second = await owner.got()
    assert [each.batch.first_sequence for each in second] == [5, 6]
    for at, each in enumerate(second, 5):
        each.store(at)
    assert owner.results == {b"%d" % number: number for number in range(7)}


@run
async def test_those_after_a_refused_one_go_again_under_a_new_producer() -> None:
    """In their order; the refused one fails alone."""
    owner = Owner()
    for value in (b"a", b"b", b"c", b"d"):
        owner.put(value)
    a, b, c, d = await owner.got()
    owner.put(b"e")
    a.store(0)
    b.refuse(TooLarge("too large"))
    c.refuse(SequenceGap("gap"))
    d.refuse(SequenceGap("gap"))
    again = await owner.got()
    assert [each.values for each in again] == [[b"c"], [b"d"], [b"e"]]
    assert [each.batch.first_sequence for each in again] == [0, 1, 2]
    assert {each.batch.producer_id for each in again} != {a.batch.producer_id}
    for at, each in enumerate(again, 1):
        each.store(at)
    assert owner.results == {b"a": 0, b"b": "too_large", b"c": 1, b"d": 2, b"e": 3}


@run
async def test_an_owner_that_has_forgotten_the_producer_is_no_error() -> None:
    """What it certainly does not have goes again; what it may have is unknown."""
    owner = Owner()
    owner.put(b"a")
    (a,) = await owner.got()
    a.refuse(SequenceGap("begins with 0"))
    (a,) = await owner.got()
    a.lose()
    owner.queue._tick()
    (a,) = await owner.got()
    a.refuse(SequenceGap("begins with 0"))
    assert owner.results == {b"a": "outcome_unknown"}


@run
async def test_what_is_sent_twice_is_answered_once() -> None:
    """A late answer to the first sending changes no number."""
    owner = Owner()
    owner.put(b"a")
    owner.put(b"b")
    first = await owner.got()
    first[1].lose()
    owner.queue._tick()
    second = await owner.got()
    assert [each.values for each in second] == [[b"a"], [b"b"]]
    second[0].store(0)
    first[0].store(0)
    second[1].store(1)
    owner.put(b"c")
    (c,) = await owner.got()
    assert c.batch.first_sequence == 2
    c.store(2)
    assert owner.results == {b"a": 0, b"b": 1, b"c": 2}


@run
async def test_plain_records_are_one_batch_and_nothing_is_left_behind() -> None:
    """A record with a time of its own is not one of them, and follows."""
    owner = Owner()
    owner.put(b"a", whole=False)
    owner.put(b"b", whole=False)
    owner.put(b"c", whole=False, times=[5])
    (together,) = await owner.got()
    assert together.values == [b"a", b"b"]
    together.store(0)
    (alone,) = await owner.got()
    alone.store(2)
    assert owner.results == {b"a": 0, b"b": 1, b"c": 2}


@run
async def test_what_was_given_up_for_certain_is_not_sent_again() -> None:
    """Its publisher was told that nothing is stored, and may have published it once more."""
    owner = Owner()
    for whole in (True, False):
        owner.queue._node.timeout = 0.0
        owner.put(b"late %d" % whole, whole=whole)
        owner.queue._node.timeout = 30.0
        owner.put(b"in time %d" % whole, whole=whole)
        for each in await owner.got():
            each.refuse(StorageFailed("moved", code="partition_moved"))
        owner.queue._tick()
        (again,) = await owner.got()
        assert (again.values, again.batch.first_sequence) == ([b"in time %d" % whole], 0)
        again.store(5)
    assert owner.results == {
        b"late 1": "no_owner",
        b"in time 1": 5,
        b"late 0": "no_owner",
        b"in time 0": 5,
    }


@run
async def test_a_batch_that_only_may_be_a_repetition_is_never_stored_anew() -> None:
    """Neither when nobody waits for it any more, nor when this node becomes the owner."""
    owner = Owner()
    refusal = Conflict("plan again", code="partitions_changed")
    owner.queue._node.timeout = 0.0
    owner.put(b"a", refusal=refusal)
    (first,) = await owner.got()
    first.lose()
    owner.queue._tick()
    (second,) = await owner.got()
    assert (first.only_repeated, second.only_repeated) == (True, True)
    assert owner.results == {b"a": "outcome_unknown"}
    second.lose()
    appended: list[Append] = []
    log: Any = owner.queue._log
    log.owned, log.replica.owner, log.append = True, "a:1/y", appended.append
    owner.queue._tick()
    assert [entry.refusal for entry in appended] == [refusal]
