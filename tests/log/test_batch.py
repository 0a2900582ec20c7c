"""The columnar batch: what goes in comes out, and nothing else is ever taken for a batch."""

import struct
import zlib
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from headrace import limits
from headrace.errors import DataCorrupt, HeadraceError, TooLarge
from headrace.log.admission import check, check_columns
from headrace.log.batch import (
    AFTER_SYNC,
    COLUMNS,
    HAS_EXPIRY,
    HAS_HEADERS,
    HAS_IDS,
    HAS_KEYS,
    HAS_TARGETS,
    HAS_TIMES,
    HEADER_BYTES,
    LOST,
    ZSTD,
    Batch,
    crc32c,
    encode,
    parse,
    parse_header,
)
from headrace.log.columns import Columns, concat
from headrace.log.commit import clamp_times
from headrace.model import derive_id, topic_hash

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = ("values", "keys", "headers", "times", "ids", "expiry", "targets")
MAX = 1 << 20

header_text = st.text(
    st.characters(exclude_categories=("Cs", "Cc", "Zs", "Zl", "Zp", "Cf", "Co", "Cn")), max_size=8
)
header_dicts = st.dictionaries(
    header_text.filter(lambda name: name and name.isprintable() and "=" not in name),
    header_text,
    max_size=3,
)


@st.composite
def columns(draw: st.DrawFn, optional: int | None = None) -> Columns:
    """Any columns at all; ``optional`` says which of the six optional ones, by their flags."""
    count = draw(st.integers(1, 20))
    flags = draw(st.integers(0, COLUMNS)) if optional is None else optional

    def column(flag: int, item: st.SearchStrategy) -> list | None:
        if not flags & flag:
            return None
        return draw(st.lists(item, min_size=count, max_size=count))

    return Columns(
        draw(st.lists(st.binary(max_size=40), min_size=count, max_size=count)),
        column(HAS_KEYS, st.none() | st.binary(max_size=9)),
        column(HAS_HEADERS, st.none() | header_dicts.filter(bool)),
        column(HAS_TIMES, st.integers(0, limits.TIMESTAMP_MS_MAX)),
        column(HAS_IDS, st.binary(min_size=16, max_size=16)),
        column(HAS_EXPIRY, st.integers(0, limits.TIMESTAMP_MS_MAX)),
        column(HAS_TARGETS, st.sampled_from([b"", b"billing", b"mail"])),
    )


def content(columns: Columns) -> dict[str, object]:
    return {name: getattr(columns, name) for name in NAMES}


def small(**more: list) -> Columns:
    return Columns([b"one", b"", b"three"], **more)


def full() -> Columns:
    """Three records with every column there is."""
    return small(
        keys=[b"k", None, b""],
        headers=[{"type": "order", "grüße": "ja"}, None, {"n": ""}],
        times=[1_000, 2_000, 2_000],
        ids=[bytes(range(16)), bytes(16), b"x" * 16],
        expiry=[0, 5_000, 1],
        targets=[b"", b"billing", b""],
    )


def seal(body: bytes, count: int = 3, flags: int = 0, *, length: int | None = None) -> bytes:
    """A batch with this body whose checksums are right, whatever nonsense is in it."""
    batch = Batch(body, crc32c(body), count, flags)
    raw = batch.raw()
    if length is not None:
        rest = raw[8:12] + struct.pack("<I", length) + raw[16:HEADER_BYTES]
        raw = raw[:4] + struct.pack("<I", crc32c(rest)) + rest + body
    return raw


def ints(*numbers: int) -> bytes:
    raw = struct.pack(f"<{len(numbers)}i", *numbers)
    return raw + bytes(-len(raw) % 8)


# --- what goes in comes out -----------------------------------------------------------------
@pytest.mark.parametrize("optional", range(COLUMNS + 1))
def test_every_combination_of_columns_has_its_flags(optional: int) -> None:
    """All 64 combinations of optional columns are encoded, checked and decoded alike."""
    everything = content(full())
    chosen = {
        name: everything[name]
        for name, flag in zip(
            NAMES[1:],
            (HAS_KEYS, HAS_HEADERS, HAS_TIMES, HAS_IDS, HAS_EXPIRY, HAS_TARGETS),
            strict=True,
        )
        if optional & flag
    }
    batch = encode(small(**chosen))
    assert batch.flags == optional
    again = check(batch.raw(), message_bytes_max=MAX)
    assert content(again.columns()) == content(small(**chosen))


@given(columns(), st.booleans())
def test_columns_survive_their_bytes(given_columns: Columns, packed: bool) -> None:
    """Whatever is encoded, packed or not, is decoded to the same from its bytes."""
    batch = encode(given_columns)
    if packed:
        batch.pack()
    raw = batch.raw()
    assert len(raw) % 8 == 0
    assert len(raw) == batch.stored_bytes
    again = parse(b"." * 24 + raw + b"behind", 24)
    assert again is not None
    assert content(again.columns()) == content(given_columns)
    assert again.raw() == raw
    assert content(check(raw, message_bytes_max=MAX).columns()) == content(given_columns)


@given(columns(), st.integers(0, limits.OFFSET_MAX - 100), st.integers(0, (1 << 64) - 1))
def test_stamping_touches_the_header_alone(cols: Columns, offset: int, producer: int) -> None:
    """Offset, times and producer are stamped without a change of the body or its checksum."""
    batch = encode(cols)
    body, crc = batch.body, batch.body_crc
    batch.base_offset, batch.producer_id = offset, producer
    batch.base_timestamp, batch.max_timestamp = 5, 6
    batch.producer_epoch, batch.first_sequence = 7, 0xFFFF_FFFF
    batch.flags |= AFTER_SYNC
    again = parse(batch.raw())
    assert again is not None
    for name in Batch.__slots__:
        if not name.startswith("_"):
            assert getattr(again, name) == getattr(batch, name), name
    assert (again.body, again.body_crc) == (body, crc)
    assert again.end_offset == offset + len(cols.values)


@given(st.lists(columns().map(lambda c: setattr(c, "times", None) or c), min_size=1, max_size=4))
def test_concat_keeps_every_record(parts: list[Columns]) -> None:
    """Gathered columns hold the records of all parts in order, with 'none' where a part had none."""
    joined = encode(concat(parts)).columns()
    expected: dict[str, list] = {name: [] for name in NAMES}
    absent = {"ids": bytes(16), "expiry": 0, "targets": b""}
    for part in parts:
        for name in NAMES:
            column = getattr(part, name)
            expected[name] += column or [absent.get(name)] * len(part.values)
    for name in NAMES:
        column = getattr(joined, name)
        if column is None:
            assert all(getattr(part, name) is None for part in parts)
        else:
            assert column == expected[name]


def test_only_what_gains_is_packed() -> None:
    """Small and random bodies stay plain; a packed one is not packed twice."""
    tiny = encode(Columns([b"a" * 16]))
    noise = encode(
        Columns([zlib.compress(str(range(3000)).encode(), 9), Path(__file__).name.encode()])
    )
    for batch in (tiny, noise):
        before = batch.raw()
        batch.pack()
        assert batch.raw() == before
    packed = encode(Columns([b"a" * 5_000]))
    packed.pack()
    assert packed.flags & ZSTD
    before = packed.raw()
    packed.pack()
    assert packed.raw() == before
    assert packed.values() == [b"a" * 5_000]


def test_a_batch_too_large_for_its_format_is_refused() -> None:
    """Records that exceed the size of a batch are an error of the caller, not a broken batch."""
    part = bytes(1 << 20)
    with pytest.raises(TooLarge) as caught:
        encode(Columns([part] * 129))
    assert caught.value.code == "batch_too_large"


# --- messages ---------------------------------------------------------------------------------
@given(columns(), st.integers(0, 5), st.integers(0, 25), st.integers(1, 3), st.booleans())
def test_messages_are_the_records(
    cols: Columns, start: int, stop: int, step: int, settled: bool
) -> None:
    """Each message carries the columns of its record, for any slice, settled or not."""
    batch = encode(cols)
    batch.base_offset, batch.base_timestamp = 100, 77
    count = len(cols.values)
    stop = min(stop, count)
    settling = object() if settled else None
    found = batch.messages(
        "orders",
        3,
        start,
        stop,
        step,
        attempt=2 if settled else 1,
        settling=settling,  # type: ignore[arg-type]
    )
    assert len(found) == len(range(start, stop, step))
    for at, message in zip(range(start, stop, step), found, strict=True):
        assert (message.topic, message.partition, message.offset) == ("orders", 3, 100 + at)
        assert message.value == message.payload == message.body == cols.values[at]
        assert message.key == (cols.keys[at] if cols.keys else None)
        assert message.headers == ((cols.headers[at] or {}) if cols.headers else {})
        assert message.timestamp == (cols.times[at] if cols.times else 77)
        assert message.attempt == (2 if settled else 1)
        derived = derive_id(topic_hash("orders"), 3, 100 + at)
        own = cols.ids[at] if cols.ids else bytes(16)
        assert message.id.bytes == own if own != bytes(16) else message.id == derived


# --- never a wrong batch ----------------------------------------------------------------------
def examples() -> list[bytes]:
    packed = encode(Columns([b"again and again " * 30, b"b"], keys=[None, b"k"]))
    packed.pack()
    assert packed.flags & ZSTD
    return [encode(small()).raw(), encode(full()).raw(), packed.raw()]


@pytest.mark.parametrize("number", range(3))
def test_every_truncation_is_refused(number: int) -> None:
    """No beginning of a batch is a batch, and neither is a batch with something behind it."""
    raw = examples()[number]
    for length in range(len(raw)):
        assert parse(raw[:length]) is None
        with pytest.raises(DataCorrupt) as caught:
            check(raw[:length], message_bytes_max=MAX)
        assert caught.value.code == "invalid_batch"
    for more in (b"\0", bytes(8), raw):
        with pytest.raises(DataCorrupt):
            check(raw + more, message_bytes_max=MAX)


@pytest.mark.parametrize("number", range(3))
def test_every_flipped_bit_is_found(number: int) -> None:
    """A batch with any one bit changed is no batch: neither parse nor check takes it."""
    raw = examples()[number]
    for at, bit in product(range(len(raw)), range(8)):
        wrong = bytearray(raw)
        wrong[at] ^= 1 << bit
        assert parse(bytes(wrong)) is None
        with pytest.raises(HeadraceError):
            check(bytes(wrong), message_bytes_max=MAX)


def test_zeros_are_never_a_batch() -> None:
    """Preallocated space cannot be taken for a batch, whatever its length."""
    for length in (0, 8, HEADER_BYTES, HEADER_BYTES + 8, 4096):
        assert parse_header(bytes(length)) is None
        assert parse(bytes(length)) is None


@pytest.mark.parametrize(
    "length",
    [0, 7, 8, 15, 17, limits.BATCH_BYTES_MAX - 8, limits.BATCH_BYTES_MAX,
     limits.BATCH_BYTES_MAX + 8, (1 << 31) - 8, 1 << 31, (1 << 32) - 8, (1 << 32) - 1],
)  # fmt: skip
def test_a_length_that_lies_is_refused(length: int) -> None:
    """A body length that does not match the bytes is refused, before anything of that size is made."""
    body = encode(small()).body
    raw = seal(body, length=length)
    assert parse(raw) is None or length == 0
    with pytest.raises(DataCorrupt):
        check(raw, message_bytes_max=MAX)


@pytest.mark.parametrize(
    "count", [0, 1, 2, 4, 5, 1000, limits.CLIENT_BATCH_RECORDS_MAX, 1 << 31, (1 << 32) - 1]
)
@pytest.mark.parametrize("make", [lambda: Columns([b"one", b"", b"three and more"]), full])
def test_a_count_that_lies_is_refused(count: int, make: Callable[[], Columns]) -> None:
    """A count of records that is not the number of offsets is refused."""
    batch = encode(make())
    with pytest.raises(DataCorrupt):
        check(seal(batch.body, count, batch.flags), message_bytes_max=MAX)


@pytest.mark.parametrize(
    "offsets",
    [
        (1, 3, 3, 8),  # not from 0
        (0, 4, 3, 8),  # falling
        (0, -1, 3, 8),  # negative in the middle
        (0, 3, 3, -8),  # negative at the end
        (-8, 3, 3, 8),
        (0, 3, 3, 9),  # behind the body
        (0, 3, 3, 1 << 30),
        (0, 3, 3, (1 << 31) - 1),
        (0, 3, 3, 0),  # less than there is
        (0, 1 << 30, 3, 8),
    ],
)
def test_offsets_that_lie_are_refused(offsets: tuple[int, ...]) -> None:
    """Offsets of values that fall, are negative or leave the body are refused."""
    with pytest.raises(DataCorrupt) as caught:
        check(seal(ints(*offsets) + b"onethree"), message_bytes_max=MAX)
    assert caught.value.code == "invalid_batch"


@pytest.mark.parametrize(
    "flag", [HAS_KEYS, HAS_HEADERS, HAS_TIMES, HAS_IDS, HAS_EXPIRY, HAS_TARGETS]
)
def test_a_column_that_is_not_there_is_refused(flag: int) -> None:
    """A flag without its column, and a column without its flag, are refused."""
    plain, everything = encode(small()), encode(full())
    with pytest.raises(DataCorrupt):
        check(seal(plain.body, flags=flag), message_bytes_max=MAX)
    with pytest.raises(DataCorrupt):
        check(seal(everything.body, flags=everything.flags & ~flag), message_bytes_max=MAX)


@pytest.mark.parametrize("flags", [0x40, 0x80, 0x0400, 0x0800, 0x1000, 0x2000, LOST, AFTER_SYNC])
def test_flags_of_the_broker_or_of_nobody_are_refused(flags: int) -> None:
    """A client cannot set the broker's own flags, nor any that has no meaning yet."""
    with pytest.raises(DataCorrupt, match="flags"):
        check(seal(encode(small()).body, flags=flags), message_bytes_max=MAX)


@pytest.mark.parametrize("flags", [0x0100, 0x0200, 0x0300])
def test_a_compression_that_is_not_one_is_refused(flags: int) -> None:
    """A body that is not packed as its flags say is refused."""
    with pytest.raises(DataCorrupt):
        check(seal(encode(small()).body, flags=flags), message_bytes_max=MAX)


def test_another_version_is_not_read() -> None:
    """A batch of a version that is not known is no batch, rather than a guess."""
    raw = bytearray(encode(small()).raw())
    raw[30] = 2
    raw[4:8] = struct.pack("<I", crc32c(bytes(raw[8:HEADER_BYTES])))
    assert parse(bytes(raw)) is None


def test_an_offset_beyond_the_last_is_not_read() -> None:
    """A header whose offsets leave the 62 bits of an offset is no header."""
    batch = encode(small())
    batch.base_offset = limits.OFFSET_MAX - batch.count
    assert parse(batch.raw()) is not None
    batch.base_offset += 1
    assert parse(batch.raw()) is None


# --- limits and contents ------------------------------------------------------------------------
def test_messages_above_the_limit_are_refused() -> None:
    """The limit of a message's size is exact, and its error names it."""
    raw = encode(Columns([bytes(100), bytes(10)])).raw()
    assert check(raw, message_bytes_max=100).count == 2
    with pytest.raises(TooLarge) as caught:
        check(raw, message_bytes_max=99)
    assert caught.value.code == "message_too_large"


def test_keys_above_the_limit_are_refused() -> None:
    """The limit of a key's size is exact."""
    for size, good in ((limits.KEY_BYTES_MAX, True), (limits.KEY_BYTES_MAX + 1, False)):
        raw = encode(Columns([b""], keys=[bytes(size)])).raw()
        if good:
            assert check(raw, message_bytes_max=MAX).keys() == [bytes(size)]
            continue
        with pytest.raises(TooLarge) as caught:
            check(raw, message_bytes_max=MAX)
        assert caught.value.code == "key_too_large"


def headers_body(lists: bytes, names: bytes, texts: bytes) -> bytes:
    return encode(small()).body + lists + names + texts


@pytest.mark.parametrize(
    ("lists", "names", "texts"),
    [
        (ints(0, 1, 1, 1), ints(0, 2) + b"\xff\xfe" + bytes(6), ints(0, 1) + b"x" + bytes(7)),
        (ints(0, 1, 1, 1), ints(0, 1) + b"x" + bytes(7), ints(0, 2) + b"\xc3\x28" + bytes(6)),
        (ints(0, 1, 1, 1), ints(0, 3) + b"\xed\xa0\x80" + bytes(5), ints(0, 0)),  # a surrogate
        (ints(0, 1, 1, 1), ints(0, 0), ints(0, 0)),  # an empty name
        (ints(0, 1, 1, 1), ints(0, 3) + b"a=b" + bytes(5), ints(0, 0)),
        (ints(0, 1, 1, 1), ints(0, 2) + b"a\n" + bytes(6), ints(0, 0)),
        (ints(0, 1, 1, 1), ints(0, 1) + b"a" + bytes(7), ints(0, 2) + b"\r\n" + bytes(6)),
        (ints(0, 1, 0, 1), ints(0, 1) + b"a" + bytes(7), ints(0, 0)),  # lists fall
        (ints(1, 1, 1, 1), ints(0, 1) + b"a" + bytes(7), ints(0, 0)),  # lists not from 0
        (ints(0, 0, 0, -1), ints(0, 1) + b"a" + bytes(7), ints(0, 0)),
        (ints(0, 0, 0, 1 << 30), ints(0, 1) + b"a" + bytes(7), ints(0, 0)),
        (ints(0, 1, 1, 1), ints(0, 9) + b"a" + bytes(7), ints(0, 0)),  # name leaves the column
    ],
)  # fmt: skip
def test_headers_that_are_no_text_are_refused(lists: bytes, names: bytes, texts: bytes) -> None:
    """Header columns with bad UTF-8, bad names, line ends or bad offsets are refused."""
    raw = seal(headers_body(lists, names, texts), flags=HAS_HEADERS)
    with pytest.raises(HeadraceError):
        check(raw, message_bytes_max=MAX)


def test_too_many_headers_are_refused_even_under_one_name() -> None:
    """The bound on headers counts what is in the column, not what is left of it in a dict."""
    count = limits.HEADERS_PER_MESSAGE_MAX + 1
    names = ints(*range(count + 1)) + b"a" * count + bytes(-count % 8)
    texts = ints(*[0] * (count + 1))
    raw = seal(headers_body(ints(0, 0, 0, count), names, texts), flags=HAS_HEADERS)
    with pytest.raises(TooLarge) as caught:
        check(raw, message_bytes_max=MAX)
    assert caught.value.code == "headers_too_large"


def test_validity_bits_behind_the_last_record_mean_nothing() -> None:
    """Only the bits of records that exist are looked at."""
    batch = encode(small(keys=[b"k", None, b"x"]))
    at = batch.column(HAS_KEYS)
    assert batch.body[at] == 0b101
    body = batch.body[:at] + b"\xfd" + batch.body[at + 1 :]
    assert check(seal(body, flags=HAS_KEYS), message_bytes_max=MAX).keys() == [b"k", None, b"x"]


@pytest.mark.parametrize("times", [[-1, 0, 0], [5, 5, -(1 << 63)]])
@pytest.mark.parametrize("name", ["times", "expiry"])
def test_negative_times_are_refused(name: str, times: list[int]) -> None:
    """Neither a record's time nor its time to live can be negative."""
    with pytest.raises(DataCorrupt):
        check(encode(small(**{name: times})).raw(), message_bytes_max=MAX)


# --- packed bodies that lie -----------------------------------------------------------------------
def packed_body(plain_len: int, packed_len: int, packed: bytes) -> bytes:
    body = struct.pack("<II", plain_len, packed_len) + packed
    return body + bytes(-len(body) % 8)


@pytest.mark.parametrize(
    "plain_len", [0, 1, 39, 41, 4096, limits.BATCH_BYTES_MAX + 1, (1 << 32) - 1]
)
@pytest.mark.parametrize("sized", [True, False])
def test_a_packed_body_has_exactly_the_length_it_says(plain_len: int, sized: bool) -> None:
    """A plain length that is not that of the content is refused, whether the frame says it or not."""
    body = encode(small()).body
    packed = zstandard.ZstdCompressor(write_content_size=sized).compress(body)
    good = seal(packed_body(len(body), len(packed), packed), flags=ZSTD)
    assert check(good, message_bytes_max=MAX).values() == [b"one", b"", b"three"]
    with pytest.raises(DataCorrupt):
        check(seal(packed_body(plain_len, len(packed), packed), flags=ZSTD), message_bytes_max=MAX)


@pytest.mark.parametrize("packed_len", [0, 3, 10_000, (1 << 32) - 1])
def test_a_packed_length_that_lies_is_refused(packed_len: int) -> None:
    """A packed length that is too short for the frame or leaves the body is refused."""
    body = encode(small()).body
    packed = zstandard.ZstdCompressor().compress(body)
    raw = seal(packed_body(len(body), packed_len, packed), flags=ZSTD)
    with pytest.raises(DataCorrupt):
        check(raw, message_bytes_max=MAX)


@pytest.mark.parametrize("claim", [1 << 31, 1 << 45, (1 << 64) - 3])
def test_a_frame_that_claims_to_be_huge_is_refused_unopened(claim: int) -> None:
    """A few bytes that say they unpack to terabytes cost nothing but an error."""
    frame = b"\x28\xb5\x2f\xfd\xe0" + claim.to_bytes(8, "little") + b"\x01\x00\x00"
    for plain_len in (100, limits.BATCH_BYTES_MAX):
        with pytest.raises((DataCorrupt, TooLarge)):
            check(
                seal(packed_body(plain_len, len(frame), frame), flags=ZSTD), message_bytes_max=MAX
            )


@pytest.mark.parametrize("body", [b"", bytes(8), b"\xff" * 8])
def test_a_packed_body_with_nothing_in_it_is_refused(body: bytes) -> None:
    """A packed body too short to be one is refused."""
    with pytest.raises(DataCorrupt):
        check(seal(body, flags=ZSTD), message_bytes_max=MAX)


# --- anything at all ------------------------------------------------------------------------------
@given(columns(), st.data())
def test_hostile_bodies_are_refused_or_decode(cols: Columns, data: st.DataObject) -> None:
    """With right checksums over a changed body, count or flags, check raises or all can be decoded."""
    batch = encode(cols)
    if data.draw(st.booleans()):
        batch.pack()
    body = bytearray(batch.body)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body) // 4 - 1)) * 4
        word = st.sampled_from([0, 1, -1, 8, len(body), 1 << 30, -(1 << 31)]) | st.integers(-9, 99)
        body[at : at + 4] = struct.pack("<i", data.draw(word))
    count = data.draw(st.just(batch.count) | st.integers(1, 40))
    flags = data.draw(st.just(batch.flags) | st.integers(0, 0xFFFF))
    try:
        good = check(seal(bytes(body), count, flags), message_bytes_max=MAX)
    except HeadraceError:
        return
    decoded = good.columns()
    for name in NAMES:
        column = getattr(decoded, name)
        assert column is None or len(column) == count
    assert len(good.messages("t", 0)) == count


@given(st.binary(max_size=300))
def test_any_bytes_are_no_batch(noise: bytes) -> None:
    """Bytes that nobody made a batch of are refused, with the magic in front of them too."""
    for raw in (noise, b"HRB1" + noise):
        assert parse(raw) is None
        with pytest.raises(DataCorrupt):
            check(raw, message_bytes_max=MAX)


# --- times ----------------------------------------------------------------------------------------
@given(columns(HAS_TIMES | HAS_KEYS), st.integers(0, 10**13), st.integers(0, 10**13), st.booleans())
def test_clamped_times_never_fall_and_stay_in_bounds(
    cols: Columns, a: int, b: int, packed: bool
) -> None:
    """Clamping makes times non-decreasing within bounds, changes no good one and no other column."""
    low, high = min(a, b), max(a, b)
    batch = encode(cols)
    batch.producer_id, batch.producer_epoch, batch.first_sequence = 7, 8, 9
    if packed:
        batch.pack()
    fixed = clamp_times(batch, low, high)
    times = fixed.times()
    assert times is not None
    assert times == sorted(times)
    assert low <= times[0] <= times[-1] <= high
    assert (fixed.base_timestamp, fixed.max_timestamp) == (times[0], times[-1])
    given_times = cols.times
    assert given_times is not None
    if (
        list(given_times) == sorted(given_times)
        and low <= given_times[0] <= given_times[-1] <= high
    ):
        assert fixed is batch
        assert times == given_times
    again = clamp_times(fixed, low, high)
    assert again is fixed
    stored = parse(fixed.raw())
    assert stored is not None
    assert stored.values() == cols.values
    assert stored.keys() == cols.keys
    assert (stored.producer_id, stored.producer_epoch, stored.first_sequence) == (7, 8, 9)


# --- for ever -------------------------------------------------------------------------------------
def test_version_1_is_read_for_ever() -> None:
    """Bytes that version 1 wrote once decode to what was put in then: plain, full and packed."""
    raw = (FIXTURES / "batches-v1.bin").read_bytes()
    found = []
    at = 0
    while at < len(raw):
        batch = parse(raw, at)
        assert batch is not None
        if not batch.flags & LOST:
            check_columns(batch)
        found.append(batch)
        at += batch.stored_bytes
    plain, everything, packed, given_up = found
    assert [batch.base_offset for batch in found] == [40, 43, 46, 48]
    assert [batch.flags for batch in found[:3]] == [
        AFTER_SYNC,
        COLUMNS,
        AFTER_SYNC | ZSTD | HAS_KEYS,
    ]
    assert content(plain.columns()) == content(small())
    assert (plain.base_timestamp, plain.producer_id) == (1_700_000_000_000, 0)
    assert content(everything.columns()) == content(full())
    assert (everything.base_timestamp, everything.max_timestamp) == (1_000, 2_000)
    assert (everything.producer_id, everything.producer_epoch) == (0xFEED_FACE_CAFE, 3)
    assert everything.first_sequence == 0xFFFF_FFFE
    assert packed.values() == [b"again and again " * 30, b"b"]
    assert packed.keys() == [None, b"k"]
    assert (given_up.count, given_up.flags) == (5, LOST | AFTER_SYNC)


def test_the_layout_of_version_1_is_as_documented() -> None:
    """A batch built by hand from the drawing at the head of batch.py is what encode builds."""
    body = (
        struct.pack("<4i", 0, 3, 3, 8) + b"onethree"
        + bytes([0b101]) + bytes(7) + struct.pack("<4i", 0, 1, 1, 1) + b"k" + bytes(7)
    )  # fmt: skip
    batch = encode(small(keys=[b"k", None, b""]))
    assert batch.body == body
    rest = struct.pack("<IIQIHHqqQII", crc32c(body), len(body), 0, 3, HAS_KEYS, 1, 0, 0, 0, 0, 0)
    assert batch.raw() == b"HRB1" + struct.pack("<I", crc32c(rest)) + rest + body
