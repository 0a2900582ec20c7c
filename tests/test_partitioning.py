"""Where records go: the same answer for everybody who publishes."""

import pytest

from headrace import limits
from headrace.partitioning import Partitioner, partition_of_key, spread


def test_the_hash_is_a_promise() -> None:
    """A key goes to the same partition in every version; other programs compute it, too."""
    assert [partition_of_key(b"%d" % n, 8) for n in range(8)] == [0, 3, 7, 4, 7, 4, 0, 3]
    assert partition_of_key(b"", 3) == 0


@pytest.mark.parametrize("count", [1, 2, 5])
def test_batches_without_keys_take_the_partitions_in_turn(count: int) -> None:
    """``current`` stays with one until ``next`` moves on."""
    partitioner = Partitioner()
    places = []
    for _ in range(2 * count):
        moved = partitioner.next(count)
        assert [partitioner.current(count)] * 2 == [moved] * 2
        places.append(moved)
    assert sorted(places[:count]) == list(range(count))
    assert places[count:] == places[:count]


def test_a_topic_that_shrinks_has_a_current_partition() -> None:
    """A topic may be deleted and created again with fewer partitions."""
    partitioner = Partitioner()
    assert [partitioner.next(4) for _ in range(3)] == [1, 2, 3]
    assert partitioner.current(2) == 1
    assert partitioner.next(2) == 0


def test_records_are_spread_by_key_and_keep_their_order() -> None:
    """Records without a key go where the caller says, all together."""
    keys = [b"a", None, b"b", b"a", None, b"c"]
    places = spread(keys, 4, 3)
    assert [number for number, _ in places] == sorted({number for number, _ in places})
    found = {index: number for number, indexes in places for index in indexes}
    assert found == {
        index: 3 if key is None else partition_of_key(key, 4) for index, key in enumerate(keys)
    }
    assert all(indexes == sorted(indexes) for _, indexes in places)


def test_batches_of_different_sizes_are_balanced_by_bytes() -> None:
    """Every third batch is large: without the sizes they would all lie in one partition."""
    partitioner, sizes = Partitioner(), [0, 0, 0]
    for number in range(300):
        size = 100_000 if number % 3 == 0 else 10
        sizes[partitioner.take(3, size)] += size
    assert max(sizes) <= 1.02 * sum(sizes) / 3


def test_what_is_gathered_for_one_partition_is_about_a_batch() -> None:
    """Calls that are not sent yet do not all go to the current partition."""
    partitioner, sizes = Partitioner(2), [0, 0, 0]
    for _ in range(31):
        number = partitioner.current(3)
        sizes[number] += 106_400
        partitioner.add(3, 106_400)
    assert max(sizes) - min(sizes) <= limits.BATCH_BYTES_TARGET + 106_400
    assert min(sizes) > 0


def test_an_added_partition_does_not_make_up_for_its_past() -> None:
    """It gets its share from now on, not everything."""
    partitioner = Partitioner()
    for _ in range(9):
        partitioner.take(2, 1000)
    places = [partitioner.take(3, 1000) for _ in range(9)]
    assert sorted(places) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
