"""Pages: each record once, however the broker cuts its batches."""

from headrace.log.batch import Batch, encode
from headrace.log.columns import Columns
from headrace.paging import messages_of, readable


def batch(low: int, high: int) -> Batch:
    made = encode(Columns([b"%d" % number for number in range(low, high)]))
    made.base_offset = low
    return made


def test_a_batch_that_begins_before_the_end_of_the_one_before_is_cut() -> None:
    """Small batches that are read at one moment are joined with later ones at the next."""
    pages = readable([[batch(0, 5)], [batch(0, 8), batch(8, 9)]], 2)
    found = messages_of(pages, "orders", 0, 100, 1 << 20)
    assert [(message.offset, message.value) for message in found] == [
        (number, b"%d" % number) for number in range(2, 9)
    ]
