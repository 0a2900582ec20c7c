"""The engine as a whole: what it does when the disk fails, fills up, or loses power."""

import errno
from random import Random

import pytest

from headrace.doctor.commands import examine, repair
from headrace.errors import (
    BrokerFailed,
    Closed,
    DataCorrupt,
    HeadraceError,
    OutcomeUnknown,
    StorageFailed,
    StorageFull,
)
from tests.broker.rig import DATA, GROUP, TOPIC, Rig
from tests.fakes import FaultyFiles, SimulatedFiles

SUSPECT = DATA / "@suspect"


def faulty(**options: object) -> tuple[Rig, FaultyFiles]:
    files = FaultyFiles(SimulatedFiles())
    return Rig(files, **options), files


# --- a sync that fails ------------------------------------------------------------------------------
def test_a_failed_sync_stops_everything() -> None:
    """Those who wait get an unknown outcome, everybody hears of it, and nothing more is taken."""
    rig, files = faulty()
    rig.subscribe()
    inbox, follower = rig.join(), rig.follow()
    rig.numbers(3)
    files.fail("sync", 1, name=".log")
    answers = [rig.send(TOPIC, b"lost"), rig.send(TOPIC, b"too")]
    rig.run()
    for answer in answers:
        with pytest.raises(OutcomeUnknown) as caught:
            answer.get()
        assert not caught.value.retryable
    assert isinstance(rig.engine.failed, BrokerFailed)
    assert rig.failures == [rig.engine.failed]
    assert inbox.ends == follower.ends == [rig.engine.failed]
    assert inbox.values == [b"0", b"1", b"2"], "what may not be stored is shown to nobody"
    for call in (
        lambda: rig.publish(TOPIC, b"x"),
        lambda: rig.publish("other", b"x"),
        lambda: rig.subscribe("new"),
        lambda: rig.follow(),
        lambda: rig.engine.create_topic("new"),
        lambda: rig.engine.delete_topic(TOPIC, lambda error: None),
    ):
        with pytest.raises(BrokerFailed):
            call()
    assert rig.files.exists(SUSPECT)
    assert files.count("sync", ".log") == 2, "a failed sync is not tried again"


def test_what_waited_behind_the_failed_sync_is_unknown_too() -> None:
    """Publishes that came while the sync was under way are answered, not forgotten."""
    rig, files = faulty()
    rig.numbers(1)
    rig.workers.hold = True
    first = rig.send(TOPIC, b"a")
    rig.run()
    second = rig.send(TOPIC, b"b")
    files.fail("sync", 1, name=".log")
    rig.workers.hold = False
    rig.workers.release()
    rig.run()
    for answer in (first, second):
        assert isinstance(answer.error, OutcomeUnknown)


@pytest.mark.parametrize("how", ["close", "kill", "crash"])
def test_the_next_start_does_not_trust_the_tail(how: str) -> None:
    """It writes the valid part anew and syncs that; then it serves, and the mark is gone."""
    rig, files = faulty()
    rig.subscribe()
    rig.numbers(3)
    files.fail("sync", 1, name=".log")
    rig.send(TOPIC, b"unknown")
    rig.run()
    files.heal()
    {"close": rig.reopen, "kill": rig.kill, "crash": rig.crash}[how]()
    assert not rig.files.exists(SUSPECT)
    served = rig.values()
    assert served[:3] == [b"0", b"1", b"2"]
    assert served[3:] in ([], [b"unknown"])
    # What was served is really there: the old pages, clean and never written, are not.
    rig.crash()
    assert rig.values() == served
    assert rig.numbers(1).offset == len(served)


@pytest.mark.parametrize("how", ["close", "kill"])
@pytest.mark.parametrize("mark", ["sync", "open", "rename", None])
def test_the_tail_is_not_trusted_if_the_mark_could_not_be_written_either(
    how: str, mark: str | None
) -> None:
    """The disk takes no more writes: ``@run``, which was written before, has to do."""
    rig, files = faulty()
    rig.numbers(3)
    files.fail("sync", 1, name=".log")
    files.fail(mark, repeat=True, name="@suspect")
    rig.send(TOPIC, b"unknown")
    rig.run()
    assert rig.engine.failed is not None
    files.heal()
    if rig.files.exists(
        SUSPECT
    ):  # what was not synced may be lost with the page cache, and only then
        rig.files.remove(SUSPECT)
    if how == "close":
        rig.close()
    else:
        rig.abandon()
        rig.disk.kill()
    assert "unclean_stop" in [finding.code for finding in examine(DATA, rig.files).findings]
    rig.open()
    served = rig.values()
    assert served == [b"0", b"1", b"2", b"unknown"]
    # What was served is really there: the old pages, clean and never written, are not.
    rig.crash()
    assert rig.values() == served


def test_only_a_clean_stop_is_called_one() -> None:
    """While it runs and after a kill the mark says so; the doctor has nothing to say after a clean stop."""
    rig, _ = faulty()
    rig.numbers(3)
    rig.close()
    for end, clean in ((rig.close, True), (rig.abandon, False), (rig.close, True)):
        rig.open()
        end()
        rig.disk.kill()
        codes = [finding.code for finding in examine(DATA, rig.files).findings]
        assert codes == ([] if clean else ["unclean_stop"])


def test_a_mark_that_finds_no_room_is_taken_away() -> None:
    """A broker starts on a full disk, and its end is then not taken for a clean one."""
    rig, files = faulty()
    rig.numbers(3)
    rig.close()
    files.fail("write_at", repeat=True, name="@run.tmp", code=errno.ENOSPC)
    rig.open()
    assert rig.values() == [b"0", b"1", b"2"]
    assert not rig.files.exists(DATA / "@run")
    rig.kill()
    assert rig.values() == [b"0", b"1", b"2"]


# --- the end of a log -----------------------------------------------------------------------------
LOG = DATA / TOPIC / "0" / "00000000000000000000.log"


@pytest.mark.parametrize("at", [4, 20, 70, -1])
@pytest.mark.parametrize("killed", [False, True])
def test_damage_at_the_end_is_not_a_torn_tail_after_a_clean_stop(at: int, killed: bool) -> None:
    """A flipped bit in the last batch: nothing is cut, its offsets are not given out again, and the doctor
    says so and repairs it. That is true even after later brokers were killed."""
    rig, _ = faulty()
    rig.numbers(3)
    size = rig.log().size_bytes()
    rig.publish(TOPIC, b"answered", b"too")
    rig.close()
    raw = bytearray(rig.files.read_file(LOG))
    raw[at if at < 0 else size + at] ^= 1
    rig.disk.put(LOG, raw)
    if killed:
        rig.open()
        rig.abandon()
        rig.disk.kill()
    report = examine(DATA, rig.files)
    assert not report.healthy
    [found] = [finding for finding in report.findings if finding.severity == "damage"]
    assert (found.code, found.first, found.end) == ("damaged_range", 3, 5)
    rig.open()
    assert rig.log().damage == [(3, 5)]
    assert rig.log().end_offset == 5
    with pytest.raises(HeadraceError) as refused:
        rig.publish(TOPIC, b"other")
    assert refused.value.code == "read_only"
    with pytest.raises(DataCorrupt):
        rig.log().read(3)
    assert [batch.values() for batch in rig.log().read(0)] == [[b"0", b"1", b"2"]]
    rig.close()
    repair(DATA, examine(DATA, rig.files), rig.files)
    assert examine(DATA, rig.files).healthy
    assert rig.publish(TOPIC, b"new").offset == 5


def test_a_file_that_was_cut_short_or_removed_is_found_after_a_clean_stop() -> None:
    """Also between two batches, and if there is no file at all."""
    for remove in (False, True):
        rig, _ = faulty()
        rig.numbers(3)
        size = rig.log().size_bytes()
        rig.publish(TOPIC, b"answered")
        rig.close()
        if remove:
            rig.files.remove(LOG)
        else:
            rig.disk.put(LOG, rig.files.read_file(LOG)[:size])
        report = examine(DATA, rig.files)
        assert not report.healthy
        rig.open()
        assert (rig.log().end_offset, rig.log().read_only is None) == (4, False)
        rig.close()
        repair(DATA, examine(DATA, rig.files), rig.files)
        assert examine(DATA, rig.files).healthy
        assert rig.publish(TOPIC, b"new").offset == 4


@pytest.mark.parametrize("durability", ["always", "interval"])
def test_a_position_beyond_the_end_is_a_witness(durability: str) -> None:
    """Without a clean stop: what was acknowledged was once on disk, if the topic promises that."""
    rig, _ = faulty(topic={"durability": durability})
    rig.subscribe()
    rig.numbers(3)
    size = rig.log().size_bytes()
    rig.publish(TOPIC, b"delivered")
    inbox = rig.join()
    inbox.ack(*inbox.take())
    rig.flush()
    rig.abandon()
    rig.disk.kill()
    raw = bytearray(rig.files.read_file(LOG))
    raw[size + 70] ^= 1
    rig.disk.put(LOG, raw)
    witnessed = durability == "always"
    assert examine(DATA, rig.files).healthy is not witnessed
    rig.open()
    assert rig.log().end_offset == (4 if witnessed else 3)
    assert (rig.log().read_only is not None) is witnessed


def test_without_a_witness_the_end_is_torn() -> None:
    """What nobody was told about is cut, as before."""
    rig, _ = faulty()
    rig.numbers(3)
    size = rig.log().size_bytes()
    rig.publish(TOPIC, b"?")
    rig.abandon()
    rig.disk.kill()
    raw = bytearray(rig.files.read_file(LOG))
    raw[size + 70] ^= 1
    rig.disk.put(LOG, raw)
    rig.open()
    assert (rig.log().end_offset, rig.log().read_only) == (3, None)


def test_a_start_that_is_interrupted_is_suspect_still() -> None:
    """Until the tail is written anew, every start has to do it."""
    rig, files = faulty()
    rig.numbers(3)
    files.fail("sync", 1, name=".log")
    rig.send(TOPIC, b"unknown")
    rig.run()
    for number in range(1, 60):
        rig.abandon()
        rig.disk.kill()
        files.heal()
        if not rig.files.exists(SUSPECT):
            break
        fault = files.fail(None, number, repeat=True)
        try:
            rig.open()
        except HeadraceError:
            assert fault.hits
        files.heal()
    rig.crash()
    assert rig.values()[:3] == [b"0", b"1", b"2"]


def test_a_mark_that_cannot_be_left_is_no_second_failure() -> None:
    """On a disk that takes nothing any more the broker stops all the same."""
    rig, files = faulty()
    rig.numbers(1)
    files.fail("sync", 1, repeat=True)
    answer = rig.send(TOPIC, b"x")
    rig.run()
    assert isinstance(answer.error, OutcomeUnknown)
    assert rig.engine.failed is not None
    rig.close()


@pytest.mark.parametrize("durability", ["interval", "never"])
def test_weaker_promises_fail_the_same_way(durability: str) -> None:
    """A sync that comes later and fails stops the broker, too."""
    rig, files = faulty(topic={"durability": durability})
    files.fail("sync", 1, name=".log")
    rig.numbers(3)
    assert rig.engine.failed is None
    if durability == "interval":
        rig.advance(1)
    else:
        rig.log().flush()
        rig.run()
    assert rig.engine.failed is not None


def test_close_after_a_failure() -> None:
    """It ends, once, and gives the directory back."""
    rig, files = faulty()
    rig.subscribe()
    rig.join()
    rig.numbers(1)
    files.fail("sync", 1, name=".log")
    rig.send(TOPIC, b"x")
    rig.run()
    rig.close()
    rig.open()
    rig.numbers(1)


# --- a disk that is full ----------------------------------------------------------------------------
def test_a_full_disk_refuses_publishes_and_nothing_else() -> None:
    """Definite and retryable; consuming and acks go on; with room it goes on by itself."""
    rig, files = faulty()
    rig.subscribe()
    inbox = rig.join()
    rig.numbers(5)
    for kind in ("write_at", "allocate"):
        files.fail(kind, 1, errno.ENOSPC, repeat=True, name=".log")
    with pytest.raises(StorageFull) as caught:
        rig.publish(TOPIC, bytes(100_000))
    assert caught.value.retryable
    assert rig.log().end_offset == 5
    attempts = files.count("write_at", ".log") + files.count("allocate", ".log")
    with pytest.raises(StorageFull):
        rig.publish(TOPIC, b"x")
    assert files.count("write_at", ".log") + files.count("allocate", ".log") == attempts, (
        "the second one is refused before anything is written"
    )
    inbox.ack(*inbox.take())
    rig.flush()
    assert rig.engine.failed is None
    files.heal()
    rig.advance(1)
    assert rig.publish(TOPIC, b"room again").offset == 5
    rig.crash()
    assert rig.values()[5:] == [b"room again"]
    assert rig.join().offsets == [5]


def test_a_small_disk_that_runs_full_for_real() -> None:
    """Bytes are counted: what was acknowledged is there, what was refused is not."""
    rig = Rig(SimulatedFiles(capacity=3 << 20), disk_reserve_bytes=0)
    stored = []
    for number in range(1000):
        value = b"%d-" % number + bytes(10_000)
        try:
            rig.publish(TOPIC, value)
        except StorageFull:
            break
        stored.append(value)
    assert 50 < len(stored) < 400
    rig.crash()
    assert rig.values() == stored


def test_a_write_that_fails_is_definite() -> None:
    """The disk refused it for another reason: nothing is stored, and the broker goes on."""
    rig, files = faulty()
    rig.numbers(1)
    files.fail("write_at", 1, errno.EIO, short=30, name=".log")
    with pytest.raises(StorageFailed) as caught:
        rig.publish(TOPIC, b"refused")
    assert caught.value.retryable
    assert rig.publish(TOPIC, b"taken").offset == 1
    rig.crash()
    assert rig.values() == [b"0", b"taken"]


# --- the power ------------------------------------------------------------------------------------
@pytest.mark.parametrize("garbage", [False, True])
def test_what_was_answered_survives_every_crash(garbage: bool) -> None:
    """Over many crashes: nothing acknowledged is lost, moved or doubled; offsets are gapless."""
    for seed in range(10):
        random = Random(seed)
        rig = Rig(topic={"partitions": 2, "segment_bytes": 4096}, seed=seed)
        known: dict[tuple[int, int], bytes] = {}
        for number in range(60):
            answers = [
                (n, rig.send(TOPIC, b"%d-%d-%d" % (seed, number, n), partition=n % 2))
                for n in range(random.randint(1, 4))
            ]
            if random.random() < 0.7:
                rig.run()
            for n, answer in answers:
                if answer.calls:
                    (receipt,) = answer.get()
                    known[receipt.partition, receipt.offset] = b"%d-%d-%d" % (seed, number, n)
            if random.random() < 0.2:
                rig.crash(random, ordered=random.random() < 0.5, garbage=garbage)
        rig.crash(random, garbage=garbage)
        found = {
            (partition, message.offset): message.value
            for partition in (0, 1)
            for message in rig.read(TOPIC, partition)
        }
        assert found.items() >= known.items()
        assert len(set(found.values())) == len(found)


def test_nothing_is_shown_before_it_is_durable() -> None:
    """While the sync is under way neither groups nor followers nor readers see the record."""
    rig = Rig()
    rig.subscribe()
    inbox, follower = rig.join(), rig.follow()
    rig.workers.hold = True
    rig.send(TOPIC, b"x")
    rig.run()
    assert rig.log().end_offset == 0
    assert inbox.messages == follower.messages == []
    rig.workers.hold = False
    rig.workers.release()
    rig.run()
    assert inbox.values == follower.values == [b"x"]


# --- opening and closing ------------------------------------------------------------------------------
def test_closing_twice_is_refused() -> None:
    """The second one is told; whoever needs to know that it ended waits for the first."""
    rig = Rig()
    engine = rig.open()
    rig.close()
    with pytest.raises(Closed):
        engine.close(lambda: None)
    with pytest.raises(Closed):
        engine.check_open()


def test_a_closed_engine_leaves_nothing_behind() -> None:
    """No timer, no handle, no lock; what lies on disk is what a reader needs and no more."""
    rig = Rig()
    rig.subscribe()
    inbox = rig.join()
    rig.numbers(10)
    rig.publish(TOPIC, b"later", delay=100)
    inbox.nack(inbox.messages[0], delay=50)
    rig.close()
    assert rig.loop.timers == 0
    content = rig.files.read_file(DATA / TOPIC / "0" / f"{0:020d}.log")
    assert 0 < len(content) < 2000, "the preallocated space is given back"
    rig.open()


def test_everything_is_there_after_a_restart() -> None:
    """Topics, records, groups, attempts, delayed messages, dead letters and producers."""
    rig = Rig()
    group = rig.subscribe(max_deliveries=2, backoff=0.0)
    inbox = rig.join(group)
    rig.numbers(4)
    first = inbox.take()
    inbox.ack(first[0])
    for _ in range(2):
        inbox.nack(next(m for m in [*first, *inbox.take()] if m.offset == 1 and m.lease.is_out(1)))
        rig.run()
    inbox.nack(first[2], delay=100)
    rig.publish("later", b"x", delay=100)
    producer = rig.wait(rig.engine.publishing.producer, "importer")
    rig.reopen()
    assert [(m.offset, m.attempt) for m in rig.join().messages] == [(3, 1), (2, 2)]
    assert [letter.message.offset for letter in rig.letters()] == [1]
    assert len(rig.engine.schedule) == 1
    assert rig.wait(rig.engine.publishing.producer, "importer")[0] == producer[0]


def test_finding_a_message_over_partitions_and_restarts() -> None:
    """The id from a receipt leads to the same bytes for ever."""
    rig = Rig(topic={"partitions": 3})
    receipts = [rig.publish(TOPIC, b"%d" % n, partition=n % 3) for n in range(9)]
    rig.crash()
    for number, receipt in enumerate(receipts):
        message = rig.engine.topics.find_message(str(receipt.id))
        assert (message.value, message.partition) == (b"%d" % number, number % 3)


def test_groups_by_topic() -> None:
    """Those over one topic, plain and by a wildcard; the broker's own are not shown."""
    rig = Rig()
    for name, topic in ((GROUP, TOPIC), ("wide", "*"), ("other", "users")):
        rig.subscribe(name, topic)
    rig.publish(TOPIC, b"x", delay=10)
    assert {s.name for s in rig.engine.subscriptions(TOPIC)} == {GROUP, "wide"}
    assert {s.name for s in rig.engine.subscriptions()} == {GROUP, "wide", "other"}
    assert len(rig.engine.all_subscriptions()) == 4
