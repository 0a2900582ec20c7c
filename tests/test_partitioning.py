"""Where records go: the same answer for everybody who publishes."""

import pytest

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
