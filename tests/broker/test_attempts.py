"""How often a message is delivered: never more often than ``max_deliveries``, however the broker ends."""

from collections import Counter
from random import Random

import pytest

from headrace.broker.attempts import AHEAD_MIN, INTERRUPTED
from headrace.broker.state import RETRY_S
from headrace.log.directory import JOURNAL
from tests.broker.rig import GROUP, TOPIC, Inbox, Rig
from tests.fakes import FaultyFiles, SimulatedFiles


def attempts(inbox: Inbox) -> list[tuple[int, int]]:
    return [(message.offset, message.attempt) for message in inbox.messages]


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
@pytest.mark.parametrize("ordering", ["none", "key"])
def test_kills_never_give_more_deliveries_than_permitted(limit: int, ordering: str) -> None:
    """A broker that is killed again and again, whatever was nacked and acked before."""
    rig = Rig()
    rig.subscribe(max_deliveries=limit, backoff=0.0, ordering=ordering)
    rig.publish(TOPIC, *(b"%d" % n for n in range(20)), keys=[str(n % 3) for n in range(20)])
    random = Random(limit)
    delivered: Counter[int] = Counter()
    for _ in range(4 * limit):
        inbox = rig.join(prefetch=8)
        for _ in range(3):
            taken = inbox.take()
            delivered.update(message.offset for message in taken)
            for message in taken:
                if random.random() < 0.3:
                    inbox.nack(message, delay=0)
            rig.run()
        delivered.update(inbox.offsets)
        rig.kill()
    assert max(delivered.values()) <= limit
    assert max(delivered.values()) == limit or limit > 3, "and the attempts are used"
    # In the end everything was delivered or is a dead letter, and nothing is stuck.
    inbox = rig.join()
    for _ in range(200):
        inbox.ack(*inbox.take())
        rig.advance(0.2)
    assert rig.engine.subscription(GROUP).lag() == 0


def test_a_first_delivery_does_not_wait_for_the_journal() -> None:
    """Nothing is written for the first deliveries of a thousand messages."""
    files = FaultyFiles(SimulatedFiles())
    rig = Rig(files)
    rig.subscribe()
    inbox = rig.join(prefetch=10_000)
    before = files.count("sync", JOURNAL)
    rig.numbers(AHEAD_MIN // 2)
    assert len(inbox.messages) == AHEAD_MIN // 2
    assert files.count("sync", JOURNAL) == before


def test_a_reader_that_is_faster_than_the_journal_waits_for_it() -> None:
    """More than the journal allows is not delivered before it allows more."""
    rig = Rig()
    rig.subscribe()
    rig.numbers(3 * AHEAD_MIN)
    rig.workers.hold = True
    inbox = rig.join(prefetch=1_000_000)
    assert len(inbox.messages) == AHEAD_MIN
    rig.workers.hold = False
    rig.workers.release()
    rig.run()
    assert len(inbox.messages) == 3 * AHEAD_MIN


def test_a_slow_journal_holds_a_steady_reader_back_only_at_the_beginning() -> None:
    """What is permitted in advance lasts for several of the journal's writes, however long one takes."""
    rig = Rig()
    rig.subscribe()
    rig.numbers(40_000)
    rig.workers.hold = True
    inbox = rig.join(prefetch=500)
    waits = []
    while rig.engine.subscription(
        GROUP
    ).lag():  # 500 messages in 10 ms, and a journal that takes 100 ms
        for _ in range(10):
            taken = inbox.take()
            waits.append(not taken)
            inbox.ack(*taken)
            rig.advance(0.01)
        rig.workers.release()
        rig.run()
    assert len(waits) < 300
    assert not any(waits[100:-10]), "no later delivery waits for the journal"


def test_a_message_that_was_out_at_a_kill_has_one_attempt_less() -> None:
    """But it keeps its last one; after a clean stop it has all of them."""
    rig = Rig()
    rig.subscribe(max_deliveries=3)
    rig.numbers(1)
    for end, attempt in (
        (rig.reopen, 1),
        (rig.kill, 1),
        (rig.reopen, 2),
        (rig.kill, 2),
        (rig.kill, 3),
    ):
        assert attempts(rig.join()) == [(0, attempt)]
        end()
    assert rig.join().messages == []
    [letter] = rig.letters()
    assert (letter.attempts, letter.reason) == (3, INTERRUPTED)


def test_the_last_delivery_is_in_the_journal_before_it_is_made() -> None:
    """Not a moment earlier, and it is taken back if it was not begun."""
    rig = Rig()
    group = rig.subscribe(max_deliveries=2, backoff=0.0)
    rig.numbers(1)
    inbox = rig.join()
    rig.workers.hold = True
    inbox.nack(inbox.take()[0])
    rig.run()
    assert inbox.messages == []
    assert group.statistics()["waiting_for_retry"] == 1
    rig.workers.hold = False
    rig.workers.release()
    rig.run()
    assert attempts(inbox) == [(0, 2)]
    group.release(inbox.messages[0].lease.id, 0)
    inbox.take()
    rig.run()
    assert attempts(inbox) == [(0, 2)]
    rig.reopen()
    assert attempts(rig.join()) == [(0, 2)]


def test_a_journal_without_room_does_not_stop_deliveries() -> None:
    """The failed attempts are written later."""
    files = FaultyFiles(SimulatedFiles())
    rig = Rig(files)
    rig.subscribe(backoff=0.0)
    rig.numbers(1)
    inbox = rig.join()
    for kind in ("write_at", "allocate"):
        files.fail(kind, repeat=True, name=JOURNAL, code=28)
    inbox.nack(inbox.take()[0])
    rig.run()
    assert attempts(inbox) == [(0, 2)]
    files.heal()
    rig.advance(RETRY_S)


def test_a_refused_write_of_the_journal_holds_deliveries_back() -> None:
    """A write that fails for another reason than a lack of room is tried again before anything is delivered."""
    files = FaultyFiles(SimulatedFiles())
    rig = Rig(files)
    rig.subscribe(topic="*", max_deliveries=2, backoff=0.0)
    inbox = rig.join()

    def refuse() -> None:
        files.heal()
        files.fail("write_at", name=JOURNAL)

    refuse()
    rig.numbers(1)
    assert inbox.messages == [], "the journal has no position in the new topic"
    rig.advance(RETRY_S)
    assert attempts(inbox) == [(0, 1)]
    refuse()
    inbox.nack(inbox.take()[0])
    rig.run()
    assert inbox.messages == [], "the journal does not count the retry"
    rig.advance(RETRY_S)
    assert attempts(inbox) == [(0, 2)]
    inbox.ack(*inbox.take())
    rig.numbers(1)
    rig.reopen()
    refuse()
    inbox = rig.join()
    assert inbox.messages == [], "the journal allows no first delivery after a start"
    rig.advance(RETRY_S)
    assert attempts(inbox) == [(1, 1)]
    rig.kill()
    inbox = rig.join()
    assert attempts(inbox) == [(1, 2)]
    rig.kill()
    assert rig.join().messages == []
    assert len(rig.letters()) == 1


def test_a_new_partition_is_in_the_journal_before_it_delivers() -> None:
    """Otherwise a kill would forget the deliveries that were made there."""
    rig = Rig()
    rig.subscribe(topic="*", max_deliveries=2)
    inbox = rig.join()
    rig.workers.hold = True
    sent = rig.send("new", b"first")
    rig.run()
    _creation, journal = rig.workers._held
    rig.workers._held.remove(journal)
    rig.workers.release()
    rig.run()
    rig.workers.release()
    rig.run()
    assert sent.get()
    assert inbox.messages == []
    rig.workers._work(*journal)
    rig.run()
    assert attempts(inbox) == [(0, 1)]


def test_a_seek_forgets_what_may_have_been_out() -> None:
    """Everything begins again with its first attempt, after a kill too."""
    rig = Rig()
    rig.subscribe(max_deliveries=3)
    rig.numbers(2)
    rig.join()
    rig.kill()
    assert attempts(rig.join()) == [(0, 2), (1, 2)]
    rig.wait(rig.engine.seek, rig.engine.subscription(GROUP), 0)
    rig.reopen()
    assert attempts(rig.join()) == [(0, 1), (1, 1)]


def test_without_a_limit_nothing_is_counted() -> None:
    """``max_deliveries=0``: a message that was out at a kill comes as its first attempt."""
    rig = Rig()
    rig.subscribe(max_deliveries=0)
    rig.numbers(2 * AHEAD_MIN)
    assert len(rig.join(prefetch=1_000_000).messages) == 2 * AHEAD_MIN
    rig.kill()
    assert {message.attempt for message in rig.join(prefetch=1_000_000).messages} == {1}


def test_a_clean_stop_takes_back_a_last_attempt_that_was_not_made() -> None:
    """The journal says that it is made, and then the broker stops before any member gets it."""
    rig = Rig()
    inbox = rig.join(rig.subscribe(max_deliveries=2, backoff=0.0))
    rig.numbers(1)
    rig.workers.hold = True
    inbox.nack(inbox.take()[0], delay=0)
    rig.run()
    closed: list[bool] = []
    rig.engine.close(lambda: closed.append(True))
    rig.run()
    while rig.workers.release():
        rig.run()
    assert closed
    assert inbox.messages == []
    rig.workers.hold = False
    rig.open()
    inbox = rig.join()
    assert attempts(inbox) == [(0, 2)]


def test_a_broker_that_stops_itself_takes_no_attempt_back() -> None:
    """A failed sync is no clean stop: what is out was delivered."""
    files = FaultyFiles(SimulatedFiles())
    rig = Rig(files)
    inbox = rig.join(rig.subscribe(max_deliveries=2, backoff=0.0))
    rig.numbers(1)
    inbox.nack(inbox.take()[0], delay=0)
    rig.run()
    assert attempts(inbox) == [(0, 2)]
    files.fail("sync", name=".log")
    rig.send(TOPIC, b"its sync fails")
    rig.run()
    assert rig.failures
    rig.advance(1.0)  # the process may live a little longer, and write its journal
    files.heal()
    rig.kill()
    inbox = rig.join()
    rig.advance(1.0)
    assert 0 not in inbox.offsets
    assert [letter.message.value for letter in rig.letters()] == [b"0"]


def test_a_retry_behind_a_full_member_is_read_once() -> None:
    """After a start, messages that failed lie among others for which there is no room yet."""
    rig = Rig()
    rig.subscribe(max_deliveries=2, backoff=0.0)
    rig.numbers(9)
    inbox = rig.join()
    for message in inbox.take():
        if message.offset in (3, 7, 8):
            inbox.nack(message, delay=30)
    rig.reopen()
    inbox = rig.join(prefetch=1)
    found = []
    for _ in range(20):
        for message in inbox.take():
            found.append((message.offset, message.attempt))
            inbox.ack(message)
        rig.advance(0.2)
    assert sorted(found) == [(n, 2 if n in (3, 7, 8) else 1) for n in range(9)]


def test_a_message_that_waits_for_its_retry_loses_nothing_by_kills() -> None:
    """Only what is out, or may be, uses up an attempt when the broker is killed."""
    rig = Rig()
    rig.subscribe(max_deliveries=4)
    rig.numbers(1)
    inbox = rig.join()
    inbox.nack(inbox.take()[0], delay=1000)
    rig.flush()
    for _ in range(5):
        rig.kill()
    assert attempts(rig.join()) == [(0, 2)]
    rig.kill()
    assert attempts(rig.join()) == [(0, 3)]


def test_kills_without_members_cost_no_attempts() -> None:
    """What nobody was given has all its attempts, but for the few that the first broker had allowed."""
    rig = Rig()
    rig.subscribe(max_deliveries=3)
    rig.numbers(3 * AHEAD_MIN)
    for _ in range(5):
        rig.kill()
    found = Counter(message.attempt for message in rig.join(prefetch=1_000_000).messages)
    assert found == {2: AHEAD_MIN, 1: 2 * AHEAD_MIN}


def test_a_kill_counts_what_a_member_had_room_for() -> None:
    """A backlog in one large batch: the messages far behind those that are out keep their attempts."""
    rig = Rig()
    rig.subscribe(max_deliveries=3)
    rig.numbers(10_000)
    rig.kill()
    seen = set()
    for _ in range(5):
        inbox = rig.join(prefetch=10)
        assert len(inbox.messages) == 10
        seen.update(inbox.offsets)
        rig.kill()
    inbox = rig.join(prefetch=1_000_000)
    assert sum(message.attempt > 1 for message in inbox.messages) <= 4 * AHEAD_MIN
    assert seen.union(inbox.offsets) == set(range(10_000)), "only what was out is given up"


def test_doubts_alone_give_no_message_up() -> None:
    """Also when the limit is lowered below what killed brokers may have delivered."""
    rig = Rig()
    rig.subscribe(max_deliveries=5)
    rig.numbers(3)
    for _ in range(3):
        rig.join()
        rig.kill()
    rig.subscribe(max_deliveries=2)
    assert attempts(rig.join()) == [(0, 2), (1, 2), (2, 2)]
