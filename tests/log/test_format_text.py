"""docs/format.md is the truth about every byte on disk, so its example and its codes are checked."""

import re
from pathlib import Path

from headrace.doctor.findings import CODES
from headrace.log.batch import AFTER_SYNC, encode
from headrace.log.columns import Columns

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")


def test_the_example_is_a_real_batch() -> None:
    """The bytes in the text are those that the code writes."""
    batch = encode(Columns([b"hello", b"hi"], keys=[b"k", None]))
    batch.base_offset = 7
    batch.base_timestamp = batch.max_timestamp = 1_700_000_000_000
    batch.flags |= AFTER_SYNC
    lines = re.findall(r"^([0-9a-f]{4})  ((?:[0-9a-f]{2} )+)", TEXT, re.MULTILINE)
    assert [int(position, 16) for position, _ in lines] == list(range(0, 16 * len(lines), 16))
    assert bytes.fromhex("".join(part for _, part in lines)) == batch.raw()


def test_every_finding_of_the_doctor_is_explained() -> None:
    """Each code that an examination can report stands in the table, with its severity."""
    table = TEXT[TEXT.index("| code | severity |") : TEXT.index("## The journal")]
    explained = {
        code: severity
        for codes, severity in re.findall(r"^\| (`[^|]+) \| (\w+) \|", table, re.MULTILINE)
        for code in re.findall(r"`([a-z_]+)`", codes)
    }
    assert explained == {code: severity for code, (severity, _) in CODES.items()}
