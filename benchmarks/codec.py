"""Encoding and decoding a columnar batch, against the plain builtins that it is made of."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise

from benchmarks.harness import Benchmark, Case, messages, rate
from headrace.log.batch import encode, parse
from headrace.log.columns import Columns

COUNT = 1000


@contextmanager
def prepared(*, quick: bool) -> Iterator[Benchmark]:
    rounds = 200 if quick else 1000
    values = messages(COUNT)
    keys = [b"key-%d" % n for n in range(COUNT)]
    headers = [{"source": "web", "n": str(n)} for n in range(COUNT)]
    columns, keyed = Columns(values), Columns(values, keys, headers)
    raw, raw_keyed = _raw(columns), _raw(keyed)
    plain = _plain_encode(values)

    def many(work) -> float:  # type: ignore[no-untyped-def]
        return rate(rounds * COUNT, lambda: [work() for _ in range(rounds)])

    def decode(source: bytes) -> list[bytes]:
        batch = parse(source)
        assert batch is not None
        return batch.values()

    def decode_all(source: bytes) -> object:
        batch = parse(source)
        assert batch is not None
        return batch.values(), batch.keys(), batch.headers()

    # As a time (the inverse of the rate) the batch may cost 1.3 times the builtins: rate ≥ 1/1.3.
    floor = 1 / 1.3
    yield Benchmark(
        "codec",
        "batches of 1,000 × 100 bytes, one core",
        [
            Case("builtins encode", lambda: many(lambda: _plain_encode(values)), "messages/s"),
            Case("encode", lambda: many(lambda: _raw(columns)), "messages/s", floor,
                 reference="builtins encode", relative=True),
            Case("builtins decode", lambda: many(lambda: _plain_decode(plain)), "messages/s"),
            Case("decode", lambda: many(lambda: decode(raw)), "messages/s", floor,
                 reference="builtins decode", relative=True),
            Case("encode, keys and headers", lambda: many(lambda: _raw(keyed)), "messages/s"),
            Case("decode, keys and headers", lambda: many(lambda: decode_all(raw_keyed)),
                 "messages/s"),
        ],
        repeat=7,
    )  # fmt: skip


def _raw(columns: Columns) -> bytes:
    return encode(columns).raw()


def _plain_encode(values: list[bytes]) -> bytes:
    """Offsets and values and nothing else: no checksum, no header, no padding."""
    offsets = array("i", accumulate(map(len, values), initial=0))
    return offsets.tobytes() + b"".join(values)


def _plain_decode(raw: bytes) -> list[bytes]:
    size = 4 * (COUNT + 1)
    offsets = memoryview(raw)[:size].cast("i").tolist()
    data = raw[size:]
    return [data[low:high] for low, high in pairwise(offsets)]
