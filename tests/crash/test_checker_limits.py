"""The checker: too many deliveries, and what is left over after the drain."""

from __future__ import annotations

from tests.crash.history import value_of
from tests.crash.test_checker import A, anomalies, end_of_one, one_message

VALUE = value_of(A, 0)


def test_more_often_than_allowed_over_restarts() -> None:
    """Three deliveries are allowed, and a kill gives none for free."""
    story = one_message()
    for attempt in (1, 2, 2):
        story.deliver("workers", 0, 0, VALUE, "nack", attempt=attempt)
        story.restart()
    assert "too often" not in end_of_one(story)
    story = one_message()
    for attempt in (1, 2, 2, 3):
        story.deliver("workers", 0, 0, VALUE, "nack", attempt=attempt)
        story.restart()
    assert "too often" in end_of_one(story)


def test_a_journal_without_room_counts_nothing() -> None:
    """Deliveries of a life that was killed while the journal had no room are not counted; later ones are."""
    story = one_message()
    for attempt in (1, 2):
        story.deliver("workers", 0, 0, VALUE, "nack", attempt=attempt)
    story.restart()
    for event in story.events:
        if event["event"] == "killed":
            event["uncounted"] = True
    for attempt in (1, 2, 3):
        story.deliver("workers", 0, 0, VALUE, "nack", attempt=attempt)
    assert "too often" not in end_of_one(story)
    story = one_message()
    story.restart()
    for attempt in (1, 2, 3, 3):
        story.deliver("workers", 0, 0, VALUE, "nack", attempt=attempt)
    assert "too often" in end_of_one(story)


def test_given_back_is_not_delivered() -> None:
    """A member that leaves in good order used up nothing."""
    story = one_message()
    for number in range(5):
        story.deliver("workers", 0, 0, VALUE, None, member=f"m{number}")
        story.tell("left", member=f"m{number}", life=1)
    story.deliver("workers", 0, 0, VALUE)
    assert end_of_one(story) == set()


def test_left_over() -> None:
    """Something is still in flight after the drain, or a file was left open."""
    story = one_message()
    story.deliver("workers", 0, 0, VALUE)
    story.tell("rest", left={"in_flight of workers": 0})
    assert end_of_one(story) == set()
    story.events.insert(-3, {"event": "rest", "at": 0, "left": {"in_flight of workers": 1}})
    assert anomalies(story.events) == {"stuck"}
    story = one_message()
    story.deliver("workers", 0, 0, VALUE)
    story.tell("closed", life=1, files_open=2)
    assert end_of_one(story) == {"stuck"}
