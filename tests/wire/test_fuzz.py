"""The fuzzer itself: what it tries holds for its own seeds, and it says when it cannot run."""

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wire.fuzz import one_input, seeds

ROOT = Path(__file__).resolve().parents[2]


def test_the_seeds_and_a_few_thousand_neighbours_pass() -> None:
    """A small part of what `make fuzz` does, without guidance."""
    rng = random.Random(7)
    for seed in seeds():
        one_input(seed)
        for _ in range(300):
            changed = bytearray(seed)
            for _ in range(rng.randint(1, 4)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            one_input(bytes(changed))


@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is not None, reason="it would run for a minute"
)
def test_without_atheris_it_says_so_and_fails() -> None:
    """A fuzzing job that did nothing must not look like one that found nothing."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.wire.fuzz", "--seconds", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "atheris is not installed" in done.stderr
