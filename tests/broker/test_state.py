"""The journal of subscriptions: what it keeps, and what becomes of groups when it is damaged."""

import errno
from collections.abc import Iterator
from functools import partial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import limits
from headrace.broker import pace
from headrace.broker.restoring import snapshot
from headrace.broker.state import FLUSH_S, PAUSE_S_MIN, RETRY_S
from headrace.errors import (
    BrokerFailed,
    Closed,
    HeadraceError,
    OutcomeUnknown,
    StorageFailed,
    StorageFull,
)
from headrace.log.batch import encode
from headrace.log.directory import JOURNAL
from headrace.log.journal import frame
from tests.broker.rig import DATA, GROUP, TOPIC, Rig, damage, flip
from tests.fakes import FaultyFiles, SimulatedFiles

PATH = DATA / JOURNAL


def faulty() -> tuple[Rig, FaultyFiles]:
    files = FaultyFiles(SimulatedFiles())
    return Rig(files), files


def half_done(rig: Rig, count: int = 10) -> None:
    """A group that has finished the first half of its messages, durably."""
    rig.subscribe(start="latest")
    inbox = rig.join()
    rig.numbers(count)
    inbox.ack(*inbox.take()[: count // 2])
    rig.flush()


def test_nothing_is_stored_during_a_pause() -> None:
    """What waits for it goes on afterwards, also if the broker closes meanwhile."""
    rig, files = faulty()
    rig.subscribe()
    inbox = rig.join()
    rig.numbers(3)
    rig.advance(1)
    go_on = rig.engine.state.pause()
    answers: list[HeadraceError | None] = []
    inbox.ack(inbox.messages[0])
    rig.engine.state.flush(answers.append)
    before = files.count("sync", JOURNAL)
    rig.advance(1)
    assert (files.count("sync", JOURNAL), answers) == (before, [])
    go_on()
    rig.advance(FLUSH_S)
    assert answers == [None]
    rig.engine.state.pause()
    inbox.ack(inbox.messages[1])
    rig.reopen()
    assert rig.join().offsets == [2]


# --- what it keeps ------------------------------------------------------------------------------
def test_acks_are_written_together_and_soon() -> None:
    """A hundred acks are one write, at most a moment later; without acks there is none."""
    rig, files = faulty()
    rig.subscribe()
    inbox = rig.join()
    rig.numbers(100)
    rig.advance(1)
    before = files.count("sync", JOURNAL)
    inbox.ack(*inbox.take())
    rig.advance(FLUSH_S)
    assert files.count("sync", JOURNAL) == before + 1
    rig.advance(10)
    assert files.count("sync", JOURNAL) == before + 1
    rig.crash()
    assert rig.join().messages == []


def test_a_slow_disk_makes_the_write_begin_earlier() -> None:
    """The write begins after half of the time that is promised, less what the last one took."""
    rig, files = faulty()
    rig.subscribe()
    inbox = rig.join()
    rig.numbers(3)
    rig.advance(1)
    for took, pause in ((0.0, FLUSH_S / 2), (0.01, FLUSH_S / 2 - 0.01), (1.0, PAUSE_S_MIN)):
        rig.engine.state.write_seconds = took
        before = files.count("sync", JOURNAL)
        inbox.ack(inbox.messages.pop())
        rig.advance(pause - 0.001)
        assert files.count("sync", JOURNAL) == before
        assert rig.engine.state.oldest_unwritten == pytest.approx(pause - 0.001)
        rig.advance(0.001)
        assert files.count("sync", JOURNAL) == before + 1
        assert rig.engine.state.oldest_unwritten == 0


def test_an_ack_during_a_write_is_in_the_next_one() -> None:
    """It does not wait for a timer that nobody has set."""
    rig, files = faulty()
    rig.subscribe()
    inbox = rig.join()
    rig.numbers(3)
    rig.advance(1)
    rig.workers.hold = True
    inbox.ack(inbox.messages[0])
    rig.advance(FLUSH_S)
    inbox.ack(inbox.messages[1])
    before = files.count("sync", JOURNAL)
    rig.workers.hold = False
    rig.workers.release()
    rig.advance(FLUSH_S)
    assert files.count("sync", JOURNAL) == before + 2
    rig.crash()
    assert rig.join().offsets == [2]


def test_a_flush_is_a_barrier() -> None:
    """Everything acknowledged before it is durable when it is answered."""
    rig = Rig()
    half_done(rig)
    rig.crash()
    assert rig.join().offsets == [5, 6, 7, 8, 9]


def test_it_is_rewritten_when_it_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file stays in proportion to what it says, and says the same after."""
    monkeypatch.setattr(limits, "JOURNAL_REWRITE_BYTES_MIN", 2_000)
    rig = Rig()
    group = rig.subscribe()
    inbox = rig.join(group)
    for number in range(200):
        rig.numbers(2, start=2 * number)
        inbox.ack(inbox.take()[0])
        rig.flush()
    journal = rig.engine.state._journal
    assert journal is not None
    assert journal.size < 30_000
    rig.crash()
    assert rig.join().offsets == list(range(1, 400, 2))


def in_pieces(patch: pytest.MonkeyPatch) -> None:
    """One entry of a snapshot in each turn of the loop."""
    patch.setattr(limits, "JOURNAL_REWRITE_BYTES_MIN", 500)
    patch.setattr(pace, "PIECE_S", 0.0)
    patch.setattr(pace, "TURN_S", 0.0)


def test_a_snapshot_is_gathered_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many positions there are, a turn of the loop takes a few of them, and acks are stored meanwhile."""
    in_pieces(monkeypatch)
    rig, files = faulty()
    for number in range(50):
        rig.subscribe(f"group-{number}")
    inbox = rig.join(rig.engine.subscription("group-0"))
    rig.numbers(100)
    journal = rig.engine.state._journal
    entries = partial(snapshot, rig.engine)
    assert journal is not None
    taken: list[int] = []
    syncs: list[int] = []

    def turn() -> None:
        """Runs once in each turn, for as long as there is something to take."""
        syncs.append(files.count("sync", JOURNAL))
        taken.append(0)
        if len(taken) % 20 == 0:
            inbox.ack(inbox.messages.pop())
            rig.engine.state.flush(lambda error: None)
        if len(taken) < 300:
            rig.loop.call_soon(turn)

    def counted() -> Iterator[bytes]:
        for entry in entries():
            taken[-1] += 1
            yield entry

    rig.engine.state._snapshot = counted
    monkeypatch.setattr(journal, "snapshot_bytes", 0)
    turn()
    rig.run()
    assert sum(taken) >= 100
    assert max(taken) <= 2
    assert syncs[150] > syncs[50] > syncs[0]  # appends
    assert journal.snapshot_bytes > 0  # it was rewritten
    rig.crash()
    found = rig.engine.subscription("group-0")
    assert found.lag() == 100 - 15


@pytest.mark.parametrize("seed", range(30))
def test_changes_while_a_snapshot_is_gathered(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is created, deleted, acknowledged and refused meanwhile, the new journal says it; also after a crash."""
    in_pieces(monkeypatch)
    rig, files = faulty()
    random = Random(seed)
    known: set[str] = set()
    epochs: dict[str, int] = {}
    acked: dict[str, set[int]] = {}
    gathered = steps = 0

    def subscribe(name: str) -> None:
        def done(error: HeadraceError | None) -> None:
            if error is None:
                known.add(name)

        if name not in acked:
            acked[name] = set()
            rig.engine.subscribe(name, TOPIC, done=done)

    def leave(name: str) -> None:
        if name in known:
            known.remove(name)
            del acked[name]
            rig.engine.unsubscribe(rig.engine.subscription(name), lambda error: None)

    def name_it(name: str) -> None:
        def done(_id: int, epoch: int, error: HeadraceError | None) -> None:
            if error is None:
                epochs[name] = epoch

        rig.engine.publishing.producer(name, done)

    def flushed(name: str, offset: int, error: HeadraceError | None) -> None:
        if error is None and name in acked:
            acked[name].add(offset)

    def ack(name: str) -> None:
        for group in known & {name}:
            offset = random.randrange(40)
            (cursor,) = rig.engine.subscription(group).cursors.values()
            cursor.done(offset)
            rig.engine.changed(cursor)
            rig.engine.state.flush(partial(flushed, group, offset))

    def refuse(name: str) -> None:
        files.fail(random.choice(["write", "create"]), 1, errno.ENOSPC, name=JOURNAL)

    def step() -> None:
        nonlocal steps, gathered
        steps += 1
        for tap in rig.engine.state.taps:
            gathered += tap is not None
        do = random.choice([subscribe, subscribe, ack, ack, ack, leave, name_it, refuse])
        do(random.choice("abcdefgh"))
        if steps < 150:
            for _ in range(random.randrange(4)):
                rig.loop.call_soon(lambda: None)
            rig.loop.call_soon(step)

    rig.numbers(40)
    step()
    rig.run()
    assert gathered > 5
    if random.random() < 0.5:
        rig.advance(2 * RETRY_S)
        assert rig.engine.state.taps == []
    files.heal()
    rig.crash(random)
    assert {s.name for s in rig.engine.subscriptions()} >= known
    for name in known:
        (cursor,) = rig.engine.subscription(name).cursors.values()
        assert {offset for offset in range(40) if cursor.is_done(offset)} >= acked[name]
    for name, epoch in epochs.items():
        assert rig.wait(rig.engine.publishing.producer, name)[1] > epoch


def test_groups_and_producers_survive_any_crash() -> None:
    """What was answered is there, and what was deleted is not, wherever the power failed."""
    for seed in range(40):
        rig = Rig()
        random = Random(seed)
        known: set[str] = set()
        epochs: dict[str, int] = {}
        for _ in range(random.randint(1, 25)):
            name = random.choice("abcdef")
            match random.randint(0, 3):
                case 0 if name in known:
                    rig.wait(rig.engine.unsubscribe, rig.engine.subscription(name))
                    known.remove(name)
                case 1:
                    _, epochs[name] = rig.wait(rig.engine.publishing.producer, name)
                case 2:
                    rig.crash(random, ordered=random.random() < 0.5)
                case _:
                    rig.subscribe(name)
                    known.add(name)
        rig.crash(random)
        assert {s.name for s in rig.engine.subscriptions()} == known
        for name, epoch in epochs.items():
            assert rig.wait(rig.engine.publishing.producer, name)[1] > epoch


def test_numbers_are_not_used_twice() -> None:
    """A new cursor never takes over what the journal says about an old one."""
    rig = Rig()
    half_done(rig)
    numbers = {c.number for s in rig.engine.all_subscriptions() for c in s.cursors.values()}
    rig.wait(rig.engine.unsubscribe, rig.engine.subscription(GROUP))
    rig.crash()
    inbox = rig.join(rig.subscribe())
    assert inbox.offsets == list(range(10))
    again = {c.number for s in rig.engine.all_subscriptions() for c in s.cursors.values()}
    assert not numbers & again


# --- when it is damaged ---------------------------------------------------------------------------
def test_a_torn_end_costs_the_last_acks_at_most() -> None:
    """Cut anywhere, the journal gives a group that is where it was, or before."""
    rig = Rig()
    half_done(rig)
    rig.crash()
    content = rig.files.read_file(PATH)
    size = len(content.rstrip(b"\0"))
    for cut in range(len(frame(b"headrace subscriptions 1")), size):
        rig.abandon()
        rig.disk.kill()
        rig.disk.put(PATH, content[:cut])
        rig.open()
        groups = rig.engine.subscriptions()
        if not groups:
            assert rig.join(rig.subscribe(start="earliest")).offsets == list(range(10))
            continue
        assert groups[0].cursors[(TOPIC, 0)].position in (0, 5)


@settings(max_examples=60)
@given(st.data())
def test_flipped_bytes_never_skip_a_message(data: st.DataObject) -> None:
    """Whatever is flipped, a group is where it was, earlier, or begins at the earliest."""
    rig = Rig()
    half_done(rig)
    half_done_too = rig.subscribe("mail")
    inbox = rig.join(half_done_too)
    inbox.ack(*inbox.take()[:3])
    rig.flush()
    rig.abandon()
    rig.disk.kill()
    size = len(rig.files.read_file(PATH).rstrip(b"\0"))
    header = len(frame(b"headrace subscriptions 1"))
    for at in data.draw(st.lists(st.integers(header, size - 1), min_size=1, max_size=4)):
        damage(rig, PATH, flip(at))
    rig.open()
    for name, position in ((GROUP, 5), ("mail", 3)):
        group = rig.subscribe(name, start="latest")  # as its consumers would, on coming back
        assert group.cursors[(TOPIC, 0)].position in (0, position)
        inbox = rig.join(group)
        assert set(range(position, 10)) <= set(inbox.offsets)


def test_a_missing_journal_is_not_taken_for_a_new_broker() -> None:
    """Where there are messages, a group that asks for the latest begins at the earliest."""
    rig = Rig()
    half_done(rig)
    rig.close()
    rig.files.remove(PATH)
    rig.open()
    assert rig.join(rig.subscribe(start="latest")).offsets == list(range(10))
    rig.reopen()  # from now on it is known again what there is
    rig.numbers(1, start=10)
    assert rig.join(rig.subscribe("new", start="latest")).offsets == []
    assert rig.join().offsets == list(range(11))


def test_a_new_broker_begins_where_it_is_told() -> None:
    """Without messages there was nothing to lose: the latest is the latest."""
    rig = Rig()
    rig.numbers(3)
    assert rig.join(rig.subscribe(start="latest")).offsets == []


def test_a_damaged_journal_is_kept_aside() -> None:
    """A person can look at it later; the broker goes on with a clean one."""
    rig = Rig()
    half_done(rig)
    rig.kill()
    content = rig.files.read_file(PATH)
    damage(rig, PATH, flip(len(frame(b"headrace subscriptions 1")) + 12))
    broken = rig.files.read_file(PATH)
    rig.kill()
    assert rig.files.read_file(PATH.with_name(JOURNAL + ".damaged")) == broken
    assert rig.files.read_file(PATH) != content
    rig.kill()
    assert not rig.engine.lost_positions


def test_an_entry_that_makes_no_sense_is_passed_over() -> None:
    """A valid checksum over nonsense costs that entry and no other."""
    rig = Rig()
    half_done(rig)
    rig.close()
    damage(rig, PATH, lambda content: content.extend(frame(b"S{") + frame(b"K{}") + frame(b"?")))
    rig.open()
    assert rig.join().offsets == [5, 6, 7, 8, 9]


# --- when it cannot be written --------------------------------------------------------------------
def test_acks_go_on_without_room_and_are_stored_later() -> None:
    """A full disk costs the journal nothing but time."""
    rig, files = faulty()
    rig.subscribe()
    inbox = rig.join()
    rig.numbers(10)
    rig.advance(1)
    for kind in ("write_at", "allocate"):
        files.fail(kind, 1, errno.ENOSPC, repeat=True, name=JOURNAL)
    inbox.ack(*inbox.take()[:5])
    with pytest.raises(StorageFull) as caught:
        rig.flush()
    assert caught.value.retryable
    assert rig.engine.subscription(GROUP).lag() == 5
    rig.advance(10)
    assert rig.engine.failed is None
    files.heal()
    rig.advance(RETRY_S)
    rig.crash()
    assert rig.join().offsets == [5, 6, 7, 8, 9]


def test_a_group_made_without_room_is_stored_later_with_its_position() -> None:
    """Its definition and its cursors are not forgotten, though their write was refused."""
    rig, files = faulty()
    rig.numbers(10)
    for kind in ("write_at", "allocate"):
        files.fail(kind, 1, errno.ENOSPC, repeat=True, name=JOURNAL)
    with pytest.raises(StorageFull):
        rig.subscribe()
    with pytest.raises(StorageFull):
        rig.subscribe()  # still not durable, and not said to be
    inbox = rig.join()
    inbox.ack(*inbox.take()[:5])
    rig.numbers(1, topic="orders2")
    files.heal()
    rig.advance(RETRY_S)
    rig.subscribe()
    rig.crash()
    assert rig.join().offsets == [5, 6, 7, 8, 9]


def test_a_wildcard_meets_a_topic_while_there_is_no_room() -> None:
    """The cursor that was attached meanwhile keeps its acks once there is room again."""
    rig, files = faulty()
    rig.subscribe(topic="*")
    inbox = rig.join()
    for kind in ("write_at", "allocate"):
        files.fail(kind, 1, errno.ENOSPC, repeat=True, name=JOURNAL)
    rig.numbers(4)
    inbox.ack(*inbox.take()[:2])
    rig.advance(2)
    files.heal()
    rig.advance(RETRY_S)
    inbox = rig.join()
    rig.crash()
    assert rig.join().offsets == [2, 3]


def test_a_start_without_room_serves_and_writes_later() -> None:
    """The journal that is there is enough to begin with."""
    rig, files = faulty()
    half_done(rig)
    rig.close()
    for kind in ("write_at", "allocate"):
        files.fail(kind, 1, errno.ENOSPC, repeat=True)
    rig.open()
    inbox = rig.join()
    assert inbox.offsets == [5, 6, 7, 8, 9]
    inbox.ack(inbox.messages[0])
    files.heal()
    rig.advance(RETRY_S)
    rig.crash()
    assert rig.join().offsets == [6, 7, 8, 9]


def test_a_failed_sync_stops_the_broker() -> None:
    """Who waits gets an unknown outcome; everybody else hears that it is over; nothing more is taken."""
    rig, files = faulty()
    rig.subscribe()
    inbox, follower = rig.join(), rig.follow()
    rig.numbers(3)
    rig.advance(1)
    inbox.ack(*inbox.take())
    files.fail("sync", 1, name=JOURNAL)
    answers = [rig.ask(rig.engine.state.flush) for _ in range(3)]
    rig.run()
    for answer in answers:
        with pytest.raises(OutcomeUnknown):
            answer.get()
    assert isinstance(rig.engine.failed, BrokerFailed)
    assert rig.failures == [rig.engine.failed]
    assert inbox.ends == follower.ends == [rig.engine.failed]
    assert rig.files.exists(DATA / "@suspect")
    for call in (
        lambda: rig.publish(TOPIC, b"x"),
        lambda: rig.subscribe("x"),
        lambda: rig.follow(),
    ):
        with pytest.raises(BrokerFailed):
            call()
    with pytest.raises(OutcomeUnknown):
        rig.flush()
    before = len(files.changes)
    rig.advance(100)
    assert len(files.changes) == before, "a stopped broker leaves the disk alone"
    rig.close()
    rig.open()
    assert rig.join().offsets in ([], [0, 1, 2])
    assert not rig.files.exists(DATA / "@suspect")


def test_nothing_is_written_behind_close() -> None:
    """The directory may be somebody else's: neither a retry nor a late ack touches the journal."""
    rig, files = faulty()
    rig.subscribe()
    inbox = rig.join()
    rig.numbers(3)
    rig.advance(1)
    for kind in ("write_at", "allocate"):
        files.fail(kind, 1, errno.ENOSPC, repeat=True, name=JOURNAL)
    inbox.ack(inbox.messages[0])
    engine, cursor = rig.engine, rig.engine.subscription(GROUP).cursors[(TOPIC, 0)]
    rig.close()
    files.heal()
    before = len(files.changes)
    engine.changed(cursor)
    late = rig.ask(engine.state.flush)
    rig.advance(100)
    assert isinstance(late.error, Closed)
    assert len(files.changes) == before
    assert rig.loop.timers == 0


def test_what_comes_during_the_last_write_is_refused() -> None:
    """It is not written behind the close, and who waits for it hears so."""
    rig, files = faulty()
    rig.subscribe()
    inbox = rig.join()
    rig.numbers(3)
    rig.advance(1)
    inbox.ack(inbox.messages[0])
    engine, cursor = rig.engine, rig.engine.subscription(GROUP).cursors[(TOPIC, 0)]
    rig.workers.hold = True
    closed: list[bool] = []
    engine.state.close(lambda: closed.append(True))
    rig.run()
    assert rig.workers.held
    cursor.done(1)
    engine.changed(cursor)
    late = rig.ask(engine.state.flush)
    rig.workers.release(1)
    rig.run()
    assert closed
    before = [change for change in files.changes if change.path == PATH]
    rig.workers.release()
    rig.advance(100)
    assert isinstance(late.error, Closed)
    assert [change for change in files.changes if change.path == PATH] == before


def test_a_start_without_room_leaves_one_timer() -> None:
    """A commit that is dropped at the start changes a position before the journal is written anew."""
    rig, files = faulty()
    rig.engine.create_topic(TOPIC)
    staging = rig.engine.staging
    batch = encode(rig.columns([b"x"]))
    staged = rig.ask(staging.stage, TOPIC, 0, batch)
    rig.run()
    committed = rig.ask(staging.commit, "job", 0, [staged.get()])
    rig.run()
    committed.get()
    rig.kill()
    rig.close()
    files.fail("create", 1, errno.ENOSPC, name=JOURNAL)
    rig.open()
    files.heal()
    rig.close()
    assert rig.loop.timers == 0


def test_close_ends_even_if_the_journal_cannot_be_cut() -> None:
    """What stays behind is preallocated space, and the next start knows it."""
    rig, files = faulty()
    half_done(rig)
    files.fail("truncate", 1, name=JOURNAL)
    rig.close()
    rig.open()
    assert rig.join().offsets == [5, 6, 7, 8, 9]


def test_the_journal_is_written_after_the_logs() -> None:
    """A redrive that ends while the broker closes has its letter marked: it does not come twice."""
    rig = Rig()
    rig.subscribe(max_deliveries=1)
    inbox = rig.join()
    rig.numbers(3)
    for message in inbox.take():
        inbox.nack(message)
    rig.run()
    rig.workers.hold = True
    redrive = rig.ask(rig.engine.dead_letters.redrive, GROUP)
    rig.run()
    closed: list[bool] = []
    rig.engine.close(lambda: closed.append(True))
    rig.workers.hold = False
    while rig.workers.release():
        rig.run()
    rig.run()
    assert closed == [True]
    assert redrive.calls == 1
    rig.abandon()
    rig.open()
    assert rig.letters() == []
    assert len(rig.values()) == 6


def test_without_a_directory() -> None:
    """Without a directory nothing is kept, and a flush has nothing to wait for."""
    rig = Rig(directory=None)
    half_done(rig)
    rig.flush()
    rig.close()
    assert len(rig.engine.topics) == 0


def test_start_and_storage_errors_have_names() -> None:
    """A disk that cannot even be opened is an error of ours, not of the system's."""
    rig, files = faulty()
    files.fail("write_at", 1, name=JOURNAL)
    with pytest.raises(StorageFailed):
        rig.open()
    rig.open()
