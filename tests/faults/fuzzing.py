"""Hostile bytes for every parser: mutations of valid inputs, without guidance (``make fuzz`` has guidance).

Each input is read whole and in pieces. A parser may find something or refuse it with a typed error, and nothing
else; and how the bytes are cut must make no difference (``tests/wire/fuzz.py``).
"""

from __future__ import annotations

from random import Random

from tests.faults.scenario import Outcome, RunOptions, Scenario
from tests.wire.fuzz import READERS, one_input, seeds


def mutate(random: Random, data: bytes, others: list[bytes]) -> bytes:
    """One to five changes of the kinds that parsers stumble over."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 3, 5))):
        at = random.randrange(len(changed) + 1)
        what = random.randrange(8)
        if what == 0 and changed:
            changed[at % len(changed)] = random.randrange(256)
        elif what == 1 and changed:
            changed[at % len(changed)] ^= 1 << random.randrange(8)
        elif what == 2:
            changed[at:at] = random.randbytes(random.choice((1, 2, 8, 40)))
        elif what == 3:
            del changed[at : at + random.choice((1, 2, 8, 40))]
        elif what == 4:
            other = random.choice(others)
            start = random.randrange(len(other))
            changed[at:at] = other[start : start + random.randrange(60)]
        elif what == 5:
            changed[at : at + 4] = random.choice(
                (b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff")
            )
        elif what == 6:
            number = random.choice(
                (b"-1", b"0", b"99999999999999999999", b"1e9", b"\r\n", b"\0", b" ")
            )
            changed[at:at] = number
        else:
            changed = changed[:at]
    return bytes(changed)


def run(options: RunOptions) -> Outcome:
    """``amount`` inputs for each parser."""
    outcome = Outcome()
    for choice, reader in enumerate(READERS):
        random = Random(f"{options.seed}/{reader}")
        pool = [seed[1:] for seed in seeds() if seed[0] % len(READERS) == choice]
        for number in range(options.amount):
            data = mutate(random, random.choice(pool), pool)
            # Any first byte that chooses this reader: it also says where the input is cut.
            first = choice + len(READERS) * random.randrange(256 // len(READERS))
            try:
                one_input(bytes((first,)) + data)
            except Exception as error:
                outcome.anomalies.append(
                    f"{reader}, input {number}: {type(error).__name__}: {error}; {(bytes((first,)) + data)!r}"
                )
                if len(outcome.anomalies) >= 10:
                    return outcome
        outcome.amount += options.amount
        outcome.figures[reader] = options.amount
        options.progress(f"{reader}: {options.amount:,} inputs, {len(outcome.anomalies)} anomalies")
    return outcome


SCENARIO = Scenario(
    name="fuzz",
    what="hostile bytes for each parser: found or refused, never anything else, however they are cut",
    unit="inputs",
    amount=1_000_000,
    quick=5_000,
    run=run,
)
