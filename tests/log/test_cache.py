"""The cache of batches: entries never hide each other."""

from random import Random

from headrace.log.batch import Batch, encode
from headrace.log.cache import BatchCache
from headrace.log.columns import Columns


def batch_at(offset: int, count: int) -> Batch:
    batch = encode(Columns([b"x"] * count))
    batch.base_offset = offset
    return batch


def test_a_batch_replaces_those_that_it_overlaps() -> None:
    """Whatever was put last for an offset is found, and nothing older hides it."""
    random = Random(1)
    for _ in range(200):
        cache = BatchCache()
        newest: dict[int, Batch] = {}
        for _ in range(random.randint(1, 12)):
            batch = batch_at(random.randint(0, 30), random.randint(1, 10))
            for gone in {
                id(newest[o]) for o in range(batch.base_offset, batch.end_offset) if o in newest
            }:
                newest = {o: kept for o, kept in newest.items() if id(kept) != gone}
            newest |= dict.fromkeys(range(batch.base_offset, batch.end_offset), batch)
            cache.put(1, batch)
        for offset in range(50):
            assert cache.find(1, offset) is newest.get(offset)
            assert cache.find(2, offset) is None
        assert cache._bytes == sum(
            b.memory_bytes for b in {id(b): b for b in newest.values()}.values()
        )


def test_following_ends_at_a_gap_and_at_the_end() -> None:
    """The neighbours of a batch are those that follow without a gap, up to the end of the log."""
    cache = BatchCache()
    for offset in (0, 1, 2, 4, 5):
        cache.put(1, batch_at(offset, 1))
    first = cache.find(1, 0)
    assert first is not None
    assert [each.base_offset for each in cache.following(1, first, 6)] == [0, 1, 2]
    assert [each.base_offset for each in cache.following(1, first, 2)] == [0, 1]
