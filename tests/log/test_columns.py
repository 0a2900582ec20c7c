"""Columns of records: how many are sent together."""

from headrace.log.columns import Columns, pieces


def test_a_piece_has_no_more_headers_than_a_broker_takes() -> None:
    """Ten thousand messages with many headers are several batches."""
    headers = {str(number): "x" for number in range(100)}
    found = pieces(Columns([b"x"] * 4_000, headers=[headers] * 4_000))
    assert [len(piece.values) for piece in found] == [750, 750, 750, 750, 750, 250]
