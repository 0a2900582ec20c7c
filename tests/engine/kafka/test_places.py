"""Where offsets are in Kafka: found, bounded, and the same after a restart."""

from headrace.engine.kafka.places import MARKS_MAX, PLACES_MAX, Mark, Places


def filled(stretches: int, each: int = 10, marks_every: int = 0) -> Places:
    """Stretch ``n`` begins at offset 10 n, at Kafka's offset 2 n + 1, at the time 100 n."""
    places = Places()
    for number in range(stretches):
        if marks_every and number % marks_every == 0:
            places.mark(number * each, number * 2, 1)
        places.add(number * each, number * 2 + 1, 1, number * 100, 50)
    return places


def test_an_offset_is_found_at_its_stretch() -> None:
    """The place of an offset is the stretch that holds it."""
    places = filled(100)
    assert places.before(0).position == 1
    assert places.before(999).position == 199
    assert places.before(501).position == 101


def test_a_mark_leads_to_what_follows_it() -> None:
    """Also if the stretch after it was forgotten, and if nothing else is known."""
    places = filled(10, marks_every=4)
    places.places = places.places[-1:]
    assert places.before(45)[:2] == (40, 8)
    assert Places().before(3)[:2] == (0, 0)


def test_a_time_is_found_at_the_first_stretch_that_reaches_it() -> None:
    """Everything before the place is older; after the newest time there is none."""
    places = filled(100)
    assert places.at_time(0).position == 1  # type: ignore[union-attr]
    assert places.at_time(4_950).position == 101  # type: ignore[union-attr]
    assert places.at_time(9_901) is None


def test_the_index_is_bounded_and_still_leads_to_every_offset() -> None:
    """When it is thinned, a place is a little before the offset, never after it."""
    places = filled(5 * PLACES_MAX, marks_every=3)
    assert len(places.places) <= PLACES_MAX
    assert len(places.marks) <= MARKS_MAX
    for offset in range(0, 50 * PLACES_MAX, 777):
        place = places.before(offset)
        assert place.offset <= offset
        assert place.position // 2 == place.offset // 10
    assert places.marks[0] == Mark(0, 0, 1, 0, 0)


def test_what_lies_between_marks_can_be_deleted() -> None:
    """Closed segments lie between the marks, from the start on; what follows the last mark is open."""
    places = filled(10, marks_every=4)  # marks at the offsets 0, 40 and 80
    assert [(s.base_offset, s.end_offset, s.bytes) for s in places.closed(0)] == [
        (0, 40, 200),
        (40, 80, 200),
    ]
    assert [s.max_timestamp for s in places.closed(40)] == [700]
    assert places.drop_before(79).offset == 40  # type: ignore[union-attr]
    assert places.size_at(40) == 200


def test_a_partition_begins_at_the_first_mark_that_is_left() -> None:
    """Kafka's first offset leads to ours, and what was deleted is forgotten."""
    places = filled(10, marks_every=4)
    assert places.begin_at(8) == 40
    assert places.places[0].offset == 40
    assert [mark.offset for mark in places.marks] == [40, 80]


def test_a_checkpoint_holds_all_of_it() -> None:
    """A dump that is loaded answers the same."""
    places = filled(100, marks_every=7)
    other = Places()
    other.load(places.dump(), places.size, places.time)
    assert (other.places, other.marks) == (places.places, places.marks)
    assert (other.size, other.time) == (places.size, places.time)
