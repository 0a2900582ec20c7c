"""Dead letters: listed, shown, edited, redriven and purged, and all of that over restarts."""

import math
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from headrace.broker import pace, redriving
from headrace.broker.administration import Administration
from headrace.errors import (
    InvalidArgument,
    MessageNotFound,
    StorageFailed,
    StorageFull,
    SubscriptionNotFound,
)
from headrace.log.interface import ReadPending
from headrace.model import DeadLetter, TopicSettings
from headrace.operations import documents, views
from headrace.operations.arguments import Correction
from headrace.operations.catalog import OPERATIONS
from tests.broker.rig import GROUP, TOPIC, Rig
from tests.fakes import FaultyFiles, SimulatedFiles


def with_letters(count: int = 5, files: FaultyFiles | None = None, **settings: Any) -> Rig:
    """A group that has given up ``count`` messages; its member is gone."""
    rig = Rig(files)
    group = rig.subscribe(max_deliveries=1, **settings)
    inbox = rig.join(group)
    rig.numbers(count)
    for message in inbox.take():
        inbox.nack(message, reason="odd" if message.offset % 2 else "even")
    rig.run()
    inbox.leave()
    assert group.lag() == 0
    return rig


def offsets(letters: list[DeadLetter]) -> list[int]:
    return [letter.offset for letter in letters]


# --- looking ------------------------------------------------------------------------------------
def test_letters_are_listed_oldest_first_and_in_pages() -> None:
    """``after`` and ``limit`` walk through them; ``where`` chooses."""
    rig = with_letters(10)
    assert offsets(rig.letters()) == list(range(10))
    assert offsets(rig.letters(limit=3)) == [0, 1, 2]
    assert offsets(rig.letters(after=2, limit=3)) == [3, 4, 5]
    assert offsets(rig.letters(where=lambda letter: letter.reason == "odd")) == [1, 3, 5, 7, 9]
    assert rig.engine.dead_letters.topics() == [(f"{GROUP}.dlq", 10)]


def test_letters_are_looked_through_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is collected in pieces; so is the search for one letter among all."""
    rig = with_letters(10)
    pieces = 0

    def soon(work: Callable[[], object]) -> None:
        nonlocal pieces
        pieces += 1
        rig.loop.call_soon(work)

    monkeypatch.setattr(pace, "PIECE_S", -1.0)
    monkeypatch.setattr(rig.engine.pace, "soon", soon)
    listing = rig.engine.dead_letters.listing(GROUP)
    with pytest.raises(ReadPending):
        listing.collect()
    assert offsets(rig.complete(listing.collect)) == list(range(10))
    before = pieces
    redriven = rig.wait(
        rig.engine.dead_letters.redrive, GROUP, where=lambda letter: letter.offset == 9
    )
    assert redriven["redriven"] == 1
    assert pieces >= before + 9


def test_all_are_purged_also_where_some_are_done() -> None:
    """Those that are stored later stay."""
    rig = with_letters(6)
    assert rig.wait(rig.engine.dead_letters.purge, GROUP, [1, 4]) == 2
    assert rig.wait(rig.engine.dead_letters.purge, GROUP, None) == 4
    assert rig.letters() == []
    rig.publish(f"{GROUP}.dlq", b"by hand")
    assert offsets(rig.letters()) == [6]
    rig.crash()
    assert offsets(rig.letters()) == [6]


def test_by_the_name_of_the_group_or_of_the_topic() -> None:
    """Both lead there; a name without letters says so."""
    rig = with_letters(2)
    assert offsets(rig.letters(f"{GROUP}.dlq")) == [0, 1]
    with pytest.raises(SubscriptionNotFound) as caught:
        rig.letters("mail")
    assert caught.value.code == "no_dead_letters"
    with pytest.raises(SubscriptionNotFound):
        rig.letters(TOPIC)


def test_a_dead_letter_topic_of_ones_own() -> None:
    """The setting names it; the group's name still leads there."""
    rig = with_letters(2, dead_letter_topic="graveyard")
    assert offsets(rig.letters()) == offsets(rig.letters("graveyard")) == [0, 1]
    assert f"{GROUP}.dlq" not in [topic.name for topic in rig.engine.topics]


def test_one_letter_is_shown() -> None:
    """With all there is to know; one that was dealt with, or never was, is not there."""
    rig = with_letters(3)
    letter = rig.complete(lambda: rig.engine.dead_letters.show(GROUP, 1))
    assert (letter.offset, letter.message.value, letter.message.offset) == (1, b"1", 1)
    assert letter.timestamp == rig.clock.now_ms()
    rig.wait(rig.engine.dead_letters.purge, GROUP, [1])
    for gone in (1, 3):
        with pytest.raises(MessageNotFound):
            rig.complete(lambda gone=gone: rig.engine.dead_letters.show(GROUP, gone))


def test_letters_survive_a_crash() -> None:
    """What is listed after it is what was stored and not dealt with."""
    for seed in range(10):
        rig = with_letters(6)
        rig.wait(rig.engine.dead_letters.purge, GROUP, [0, 3])
        rig.crash(Random(seed))
        assert offsets(rig.letters()) == [1, 2, 4, 5]


def test_letters_are_found_though_the_journal_did_not_know_of_them() -> None:
    """A crash just after the first dead letter does not hide it."""
    rig = with_letters(1)
    rig.kill()
    found = rig.letters()
    assert [letter.message.value for letter in found] in ([b"0"], [b"0", b"0"])


def test_what_was_published_there_by_hand() -> None:
    """It is listed too, with what is known; nonsense in our headers breaks nothing."""
    rig = with_letters(1)
    dead = f"{GROUP}.dlq"
    rig.publish(dead, b"by hand")
    rig.publish(
        dead,
        b"forged",
        headers=[
            {
                "headrace-origin-id": "nonsense",
                "headrace-origin-partition": "9" * 5000,
                "headrace-origin-offset": "-1",
                "headrace-attempts": "²",
            }
        ],
    )
    _, by_hand, forged = rig.letters()
    assert (by_hand.message.value, by_hand.reason) == (b"by hand", "published by hand")
    assert by_hand.subscription == GROUP
    assert (forged.message.partition, forged.attempts, forged.message.offset) == (0, 0, 2)
    assert rig.engine.dead_letters.show(GROUP, 2).message.id == forged.message.id


def test_what_has_no_origin_is_not_redriven() -> None:
    """It would come back as a worse letter; what has one goes its way."""
    rig = with_letters(1)
    rig.publish(f"{GROUP}.dlq", b"by hand")
    result = rig.wait(rig.engine.dead_letters.redrive, GROUP)
    assert (result["redriven"], result["skipped"]) == (1, 1)
    assert "does not say which topic it came from" in result["reason"]
    [left] = rig.letters()
    assert (left.message.value, left.reason) == (b"by hand", "published by hand")


def test_what_has_no_origin_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on its page nor behind it; how many went is known, and that one did not."""
    monkeypatch.setattr(redriving, "PAGE", 1)
    rig = with_letters(2)
    rig.publish(f"{GROUP}.dlq", b"by hand")
    rig.publish(f"{GROUP}.dlq", b"found later", headers=[{"headrace-origin-topic": TOPIC}])
    result = rig.wait(rig.engine.dead_letters.redrive, GROUP)
    assert (result["redriven"], result["skipped"]) == (3, 1)
    assert result["reason"].startswith("dead letter 2: it does not say")
    assert [letter.message.value for letter in rig.letters()] == [b"by hand"]


@pytest.mark.parametrize("topic", ["a/b", "__staged", "x" * 300, "not there", "", "closed"])
def test_a_forged_letter_is_skipped_and_the_others_go(topic: str) -> None:
    """Whatever a publisher has written into it: a redrive of all ends well, and counts it."""
    rig = with_letters(2)
    rig.publish(f"{GROUP}.dlq", b"forged", headers=[{"headrace-origin-topic": topic}])
    rig.publish(f"{GROUP}.dlq", b"last", headers=[{"headrace-origin-topic": TOPIC}])
    rig.engine.auto_create_topics = False
    for _ in range(2):
        result = rig.wait(rig.engine.dead_letters.redrive, GROUP)
        assert result["skipped"] == 1
        assert result["reason"].startswith("dead letter 2: ")
    assert [letter.message.value for letter in rig.letters()] == [b"forged"]
    assert rig.values()[2:] == [b"0", b"1", b"last"]


def test_letters_that_somebody_else_has_written_are_listed() -> None:
    """A pipeline's, whose name nobody has asked for yet."""
    rig = with_letters(1)
    rig.engine.create_topic("bills.dlq", TopicSettings())
    rig.engine.create_topic("empty.dlq", TopicSettings())
    rig.publish("bills.dlq", b"one")
    assert rig.engine.dead_letters.topics() == [(f"{GROUP}.dlq", 1), ("bills.dlq", 1)]


@pytest.mark.parametrize(
    ("reason", "kept"),
    [
        ("", ""),
        ("two\nlines\r\n of  it", "two lines of it"),
        ("NUL \0 and \x1b[31m", "NUL ? and ?[31m"),
        ("half \ud83d of a pair", "half ? of a pair"),
        ("größer 😀", "größer 😀"),
        ("x" * 5000, "x" * 1000),
    ],
)
def test_whatever_a_consumer_says_fits_into_a_header(reason: str, kept: str) -> None:
    """The reason is one printable line, so that every protocol can carry it."""
    rig = Rig()
    inbox = rig.join(rig.subscribe(max_deliveries=1))
    rig.numbers(1)
    inbox.nack(inbox.take()[0], reason=reason)
    rig.run()
    assert [letter.reason for letter in rig.letters()] == [kept]
    assert not rig.failures


# --- redriving ----------------------------------------------------------------------------------
def test_redriven_to_the_group_that_failed() -> None:
    """Back to the origin, for that group alone, with payload, key, headers and id as they were.

    One header more says when it was first published.
    """
    rig = Rig()
    group, other = rig.subscribe(max_deliveries=1), rig.subscribe("mail")
    inbox, unaffected = rig.join(group), rig.join(other)
    receipt = rig.publish(TOPIC, b"x", keys=["k"], headers=[{"a": "b"}])
    inbox.nack(inbox.take()[0])
    rig.run()
    unaffected.take()
    assert rig.wait(rig.engine.dead_letters.redrive, GROUP)["redriven"] == 1
    (message,) = inbox.take()
    assert (message.topic, message.offset, message.attempt) == (TOPIC, 1, 1)
    headers = {"a": "b", "headrace-origin-timestamp": str(receipt.timestamp)}
    assert (message.value, message.key, message.headers) == (b"x", b"k", headers)
    assert message.id == receipt.id
    assert unaffected.messages == []
    assert rig.letters() == []
    inbox.ack(message)
    assert group.lag() == 0


def test_redriven_to_the_whole_topic() -> None:
    """``to="topic"``: every group gets it."""
    rig = with_letters(2)
    other = rig.join(rig.subscribe("mail", start="latest"))
    assert rig.wait(rig.engine.dead_letters.redrive, GROUP, to="topic")["redriven"] == 2
    assert other.values == [b"0", b"1"]
    assert rig.join().values == [b"0", b"1"]


def test_a_redriven_message_may_fail_again() -> None:
    """It becomes a new letter whose origin is where it was redriven to."""
    rig = with_letters(1)
    inbox = rig.join()
    rig.wait(rig.engine.dead_letters.redrive, GROUP)
    inbox.nack(inbox.take()[0], reason="again")
    rig.run()
    (letter,) = rig.letters()
    assert (letter.offset, letter.reason, letter.message.offset) == (1, "again", 1)


def test_a_letter_keeps_when_its_message_was_published_and_its_attempts() -> None:
    """In storage and in every listing; after an edit, and after a redrive that fails again."""
    rig = Rig()
    inbox = rig.join(rig.subscribe(max_deliveries=2, backoff=0))
    published = rig.publish(TOPIC, b"x").timestamp
    for _ in range(2):
        rig.advance(10)
        inbox.nack(inbox.take()[0])
        rig.run()

    def check(attempts: int = 2) -> None:
        (letter,) = rig.letters()
        assert (letter.message.timestamp, letter.attempts) == (published, attempts)
        assert letter.message.attempt == attempts
        assert letter.timestamp >= published + 20_000
        shown = views.letter_view(rig.engine.dead_letters.show(GROUP, letter.offset))
        assert shown["message"]["timestamp"] == views.iso(published)
        assert shown["message"]["attempt"] == shown["attempts"] == attempts
        assert documents.to_letter(documents.letter(letter)).message.timestamp == published

    check()
    rig.wait(rig.engine.dead_letters.edit, GROUP, 0, b"y", None)
    check()
    rig.advance(10)
    rig.wait(rig.engine.dead_letters.redrive, GROUP)
    for attempt in (1, 2):
        (again,) = inbox.take()
        assert again.timestamp >= published + 30_000, "its time to live begins anew"
        assert (again.headers["headrace-origin-timestamp"], again.attempt) == (
            str(published),
            attempt,
        )
        inbox.nack(again)
        rig.run()
    check()


@pytest.mark.parametrize("text", [None, "soon", "-5", str(1 << 60)])
def test_a_letter_that_does_not_say_its_time(text: str | None) -> None:
    """One of an earlier version, or a forged one, has the time at which it was stored."""
    rig = with_letters(1)
    headers = {} if text is None else {"headrace-origin-timestamp": text}
    receipt = rig.publish(f"{GROUP}.dlq", b"x", headers=[{**headers, "headrace-attempts": "3"}])
    letter = rig.letters()[1]
    assert (letter.message.timestamp, letter.attempts) == (receipt.timestamp, 3)


def test_a_forged_time_beyond_the_calendar_can_be_shown() -> None:
    """It is shown as the last time that ISO 8601 has, and is no poison for the list."""
    rig = with_letters(1)
    rig.publish(f"{GROUP}.dlq", b"x", headers=[{"headrace-origin-timestamp": str((1 << 53) - 1)}])
    shown = views.letter_view(rig.letters()[1])
    assert shown["message"]["timestamp"].startswith("9999-12-31T23:59:59.")


def test_redrive_some() -> None:
    """By offset, by a filter, and up to a number of them."""
    rig = with_letters(10)
    redrive = rig.engine.dead_letters.redrive
    assert rig.wait(redrive, GROUP, offsets=[1, 4, 99])["redriven"] == 2
    assert (
        rig.wait(redrive, GROUP, where=lambda letter: letter.reason == "odd", limit=2)["redriven"]
        == 2
    )
    assert rig.wait(redrive, GROUP, limit=0)["redriven"] == 0
    assert offsets(rig.letters()) == [0, 2, 6, 7, 8, 9]
    assert rig.wait(redrive, GROUP, where=lambda letter: False)["redriven"] == 0
    assert rig.wait(redrive, GROUP)["redriven"] == 6


def test_redrive_at_a_rate() -> None:
    """Five a second is one every 0.2 seconds, not five at once."""
    rig = with_letters(10)
    inbox = rig.join()
    answer = rig.ask(rig.engine.dead_letters.redrive, GROUP, rate=5)
    rig.run()
    for count in range(1, 11):
        assert len(inbox.messages) == count
        rig.advance(0.2)
    rig.advance(0.2)
    assert answer.get()["redriven"] == 10


def test_redrive_many_at_a_rate() -> None:
    """A high rate goes in pages, and in no second more than it says."""
    rig = with_letters(100)
    inbox = rig.join()
    rig.ask(rig.engine.dead_letters.redrive, GROUP, rate=40)
    before = 0
    for _ in range(3):
        rig.advance(1)
        assert 0 < len(inbox.messages) - before <= 44
        before = len(inbox.messages)
    assert before == 100


def test_new_letters_are_not_part_of_a_redrive() -> None:
    """What fails again while it runs waits for the next one: a redrive ends."""
    rig = with_letters(3)
    inbox = rig.join()
    answer = rig.ask(rig.engine.dead_letters.redrive, GROUP, rate=1)
    for _ in range(20):
        for message in inbox.take():
            inbox.nack(message)
        rig.advance(0.5)
    assert answer.get()["redriven"] == 3
    assert offsets(rig.letters()) == [3, 4, 5]


def test_two_redrives_at_once_publish_each_letter_once() -> None:
    """The second leaves alone what the first has under way."""
    rig = with_letters(5)
    rig.workers.hold = True
    answers = [rig.ask(rig.engine.dead_letters.redrive, GROUP) for _ in range(2)]
    rig.run()
    rig.workers.hold = False
    while rig.workers.release():
        rig.run()
    assert sum(answer.get()["redriven"] for answer in answers) == 5
    assert len(rig.values()) == 10


def test_a_redrive_that_finds_no_room() -> None:
    """The error says so, what was not published stays a letter, and a later redrive does it."""
    files = FaultyFiles(SimulatedFiles())
    rig = with_letters(4, files)
    for kind in ("write_at", "allocate"):
        files.fail(kind, repeat=True, name=".log", code=28)
    with pytest.raises(StorageFull):
        rig.wait(rig.engine.dead_letters.redrive, GROUP)
    assert offsets(rig.letters()) == [0, 1, 2, 3]
    files.heal()
    rig.advance(1)
    assert rig.wait(rig.engine.dead_letters.redrive, GROUP)["redriven"] == 4


def test_a_crash_during_a_redrive_neither_doubles_nor_loses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wherever it is, and however often: after the next redrive each message is at its origin once more."""
    monkeypatch.setattr(redriving, "PAGE", 2)
    doubled = 0
    for seed in range(60):
        rig = with_letters(6)
        rig.flush()
        for crash in range(2):
            rig.workers.hold = True
            rig.ask(rig.engine.dead_letters.redrive, GROUP, rate=30 if seed % 2 else None)
            for _ in range((seed // 2 + 3 * crash) % 12):
                rig.run()
                rig.workers.release()
            rig.advance(0.04 * (seed % 3))
            rig.crash(Random(seed), ordered=bool(seed % 3))
            rig.workers.hold = False
            redriven = rig.values()[6:]
            doubled += len({*redriven} & {letter.message.value for letter in rig.letters()})
        rig.wait(rig.engine.dead_letters.redrive, GROUP)
        assert sorted(rig.values()[6:]) == [b"%d" % n for n in range(6)], seed
        assert rig.letters() == []
    assert doubled  # some were at their origin and still letters: only the newest batch told


def test_a_letter_that_died_again_is_redriven_again_after_a_crash() -> None:
    """Its message has the id of the one that was redriven before, and is another."""
    rig = with_letters(1)
    rig.wait(rig.engine.dead_letters.redrive, GROUP)
    inbox = rig.join(rig.engine.subscription(GROUP, TOPIC))
    [message] = inbox.take()
    inbox.nack(message, reason="again")
    rig.run()
    inbox.leave()
    rig.flush()
    rig.crash()
    assert [letter.reason for letter in rig.letters()] == ["again"]
    assert rig.wait(rig.engine.dead_letters.redrive, GROUP)["redriven"] == 1
    assert rig.values() == [b"0"] * 3


def test_corrected_letters() -> None:
    """Only these are redriven, with new contents where they are given; one that was dealt with is left out."""
    rig = with_letters(4)
    corrections = {
        1: Correction(value=b"better", headers={"a": "b"}),
        2: Correction(key=b"k"),
        7: Correction(value=b"nobody"),
    }
    redrive = rig.engine.dead_letters.redrive
    assert rig.wait(redrive, GROUP, corrections=corrections)["redriven"] == 2
    assert rig.wait(redrive, GROUP, corrections=corrections)["redriven"] == 0
    assert rig.values()[4:] == [b"better", b"2"]
    assert offsets(rig.letters()) == [0, 3]
    too_large = {0: Correction(value=b"x" * (rig.engine.max_message_size + 1)), 3: Correction()}
    answer = rig.wait(redrive, GROUP, corrections=too_large)
    assert (answer["redriven"], answer["skipped"]) == (1, 1)
    assert "dead letter 0: " in answer["reason"]


def test_a_large_page_is_several_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is one batch, so that the newest batch of a partition tells of all of its letters."""
    monkeypatch.setattr("headrace.limits.BATCH_BYTES_TARGET", 2)
    rig = with_letters(5)
    assert rig.wait(rig.engine.dead_letters.redrive, GROUP)["redriven"] == 5
    assert rig.values()[5:] == [b"%d" % n for n in range(5)]


def test_a_filter_that_fails_ends_the_redrive() -> None:
    """Whoever waits is answered, at the first letter or at a later one."""
    rig = with_letters(4)

    def fussy(letter: DeadLetter) -> bool:
        if letter.offset == 2:
            raise RuntimeError("cannot decide")
        return True

    answer = rig.ask(rig.engine.dead_letters.redrive, GROUP, where=fussy, rate=10)
    rig.advance(10)
    with pytest.raises(InvalidArgument) as caught:
        answer.get()
    assert caught.value.code == "invalid_filter"
    assert offsets(rig.letters()) == [2, 3]


def test_a_redrive_ends_with_the_broker() -> None:
    """One that would take an hour is answered when the broker closes, and writes nothing behind it."""
    rig = with_letters(10)
    answer = rig.ask(rig.engine.dead_letters.redrive, GROUP, rate=0.5)
    rig.run()
    rig.close()
    rig.advance(10)
    assert answer.calls == 1
    assert answer.error is not None
    assert answer.error.code == "closed"


def test_the_origin_is_gone() -> None:
    """A redrive to a deleted topic makes it anew, as a publish would."""
    rig = with_letters(2)
    rig.wait(rig.engine.delete_topic, TOPIC)
    assert rig.wait(rig.engine.dead_letters.redrive, GROUP)["redriven"] == 2
    assert rig.values() == [b"0", b"1"]


# --- editing and purging --------------------------------------------------------------------------
def test_a_letter_is_corrected_and_redriven() -> None:
    """The new one has another offset and the same origin; the old one is gone, after a crash too."""
    rig = with_letters(2)
    edit = rig.engine.dead_letters.edit
    assert rig.wait(edit, GROUP, 0, b"better", None) == 2
    assert rig.wait(edit, GROUP, 1, None, {"checked": "yes"}) == 3
    rig.crash()
    first, second = rig.letters()
    assert (first.message.value, first.message.offset, first.reason) == (b"better", 0, "even")
    assert (second.message.value, second.message.headers) == (b"1", {"checked": "yes"})
    rig.wait(rig.engine.dead_letters.redrive, GROUP)
    assert rig.join().values == [b"better", b"1"]


@pytest.mark.parametrize(
    ("value", "headers", "code"),
    [
        (7, None, "invalid_value"),
        (b"x" * 2000, None, "message_too_large"),
        (None, {"a": 1}, "invalid_headers"),
        (None, {"a": "\n"}, "invalid_headers"),
        (None, 7, "invalid_headers"),
    ],
)
def test_a_bad_correction_is_refused(value: Any, headers: Any, code: str) -> None:
    """By the rules of every publish; the letter stays as it was."""
    rig = with_letters(1)
    rig.engine.max_message_size = 1000
    with pytest.raises(InvalidArgument) as caught:
        rig.ask(rig.engine.dead_letters.edit, GROUP, 0, value, headers)
    assert caught.value.code == code
    rig.run()
    assert [letter.message.value for letter in rig.letters()] == [b"0"]
    assert not rig.failures


def test_text_as_a_correction() -> None:
    """A str is what it is everywhere: its UTF-8."""
    rig = with_letters(1)
    rig.wait(rig.engine.dead_letters.edit, GROUP, 0, "größer", None)
    assert rig.letters()[0].message.value == "größer".encode()


def test_purged_is_gone_for_good() -> None:
    """Some, then all; how many is the answer, and a crash brings none back."""
    rig = with_letters(6)
    purge = rig.engine.dead_letters.purge
    assert rig.wait(purge, GROUP, [1, 2, 2, 77]) == 2
    assert rig.wait(purge, GROUP, [1]) == 0
    assert rig.wait(purge, GROUP, None) == 4
    rig.crash()
    assert rig.letters() == []
    assert rig.engine.dead_letters.topics() == [(f"{GROUP}.dlq", 0)]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("redrive", {"to": "nowhere"}),
        *[("redrive", {"rate": rate}) for rate in (0, -1, math.nan, math.inf, "fast", True)],
        *[("redrive", {"limit": limit}) for limit in (-1, "3")],
        *[("redrive", {"offsets": offsets}) for offsets in (3, ["3"], [-3])],
        *[("purge_dead_letters", {"offsets": offsets}) for offsets in ("all", [None])],
        *[("dead_letter", {"offset": offset}) for offset in ("0", -1)],
        *[("dead_letters", page) for page in ({"after": "0"}, {"limit": -1})],
    ],
)
def test_bad_arguments(name: str, given: dict[str, Any]) -> None:
    """Every one is refused before anything is done."""
    rig = with_letters(2)
    call = Administration(rig.engine).call(OPERATIONS[name], {"subscription": GROUP, **given})
    with pytest.raises(InvalidArgument):
        call.send(None)
    rig.advance(10)
    assert offsets(rig.letters()) == [0, 1]
    assert rig.values() == [b"0", b"1"]


def test_a_letter_that_is_stored_while_the_broker_stops_is_not_stored_again() -> None:
    """A clean stop finishes what is under way: the message is done."""
    rig = Rig()
    inbox = rig.join(rig.subscribe(max_deliveries=1))
    rig.publish(TOPIC, b"poison")
    rig.workers.hold = True
    inbox.nack(inbox.take()[0])
    rig.run()
    closed: list[bool] = []
    rig.engine.close(lambda: closed.append(True))
    rig.run()
    while rig.workers.release():
        rig.run()
    assert closed
    rig.workers.hold = False
    rig.open()
    inbox = rig.join(rig.engine.subscription(GROUP))
    assert inbox.messages == []
    assert offsets(rig.letters()) == [0]


def test_letters_that_cannot_be_read_are_an_answer_and_not_a_crash() -> None:
    """The disk refuses a read: the operation says so, and the next try works."""
    if Rig.slow:
        pytest.skip("the read fails before it is pending")
    files = FaultyFiles(SimulatedFiles())
    rig = with_letters(2, files=files)
    rig.reopen()  # nothing is cached any more
    files.fail("read_at", name=".log")
    given = {"subscription": GROUP}
    with pytest.raises(StorageFailed, match="could not be read"):
        Administration(rig.engine).call(OPERATIONS["dead_letters"], given).send(None)
    assert offsets(rig.letters()) == [0, 1]


def test_a_group_over_dead_letters_does_not_feed_itself() -> None:
    """Its own dead letters go to a topic of their own."""
    rig = with_letters(1)
    dead = f"{GROUP}.dlq"
    inbox = rig.join(rig.subscribe(topic=dead, max_deliveries=1))
    assert inbox.values == [b"0"]
    inbox.nack(inbox.take()[0])
    rig.advance(100)
    assert inbox.messages == []
    assert [letter.message.topic for letter in rig.letters(f"{dead}.dlq")] == [dead]


def test_letters_of_a_durable_topic_survive_although_the_first_came_from_memory() -> None:
    """A subscription over several topics has one topic of dead letters, and it is on disk."""
    rig = Rig()
    rig.engine.create_topic("shop.prices", TopicSettings(durable=False))
    rig.engine.create_topic("shop.orders", TopicSettings())
    inbox = rig.join(rig.subscribe(topic="shop.*", max_deliveries=1))
    for topic in ("shop.prices", "shop.orders"):
        rig.publish(topic, topic)
        inbox.nack(inbox.take()[0])
        rig.run()
    rig.kill()
    assert [letter.message.value for letter in rig.letters()] == [b"shop.prices", b"shop.orders"]
