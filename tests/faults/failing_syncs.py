"""Syncs that fail: by strace, which replaces the kernel's answer, and on an ext4 whose disk runs full.

strace: one ``fdatasync`` of a thread answers EIO (``tests/crash/fsync_fault.py``). The broker must not try again:
whoever waits hears that the outcome is unknown, the process ends with a code of its own, and the next start
does not trust what was cached.

ext4: the data directory lies on an ext4 in a file on a small tmpfs (a loop device). A ballast file takes the
room of the tmpfs, so that the ext4, which believes that it has room, cannot write its pages back: now the
kernel itself fails the sync, and drops the pages. The loop device gets one page at a time: it reports a write of several
pages as done although the tmpfs had room for only some of them (seen: 8 of 40 KB), and a disk that lies is not the
subject here. After that the file system is unmounted, checked and
mounted again, so that nothing comes from a cache, and a new broker must find everything that was answered.
It needs root, ``losetup`` and ``mkfs.ext4``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

from tests.crash import fsync_fault
from tests.crash.runner import START_S, Run
from tests.crash.victim import EXIT_FAILED
from tests.faults.kills import collect, figures
from tests.faults.scenario import Outcome, RunOptions, Scenario

ROUNDS_A_RUN = 20
EXT4_SHARE = 0.1
"""Of all failing syncs, these are made by a real file system; each takes some seconds."""
TMPFS_BYTES = 96 << 20
IMAGE_BYTES = 256 << 20


def ext4_absence() -> str | None:
    if os.geteuid() != 0:
        return "a file system of its own needs root"
    missing = [name for name in ("losetup", "mkfs.ext4", "e2fsck") if shutil.which(name) is None]
    return f"{', '.join(missing)} is not installed" if missing else None


def _do(*command: object, ok: tuple[int, ...] = (0,)) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode not in ok:
        raise OSError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
    return done.stdout.strip()


class Ext4:
    """An ext4 in a file on a tmpfs that is smaller than the file says."""

    def __init__(self, directory: Path):
        self._tmpfs, self.mount = directory / "tmpfs", directory / "ext4"
        self._ballast = self._tmpfs / "ballast"
        self._loop = ""

    def __enter__(self) -> Ext4:
        self._tmpfs.mkdir(parents=True)
        self.mount.mkdir()
        _do("mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", self._tmpfs)
        try:
            image = self._tmpfs / "image"
            with image.open("wb") as file:
                file.truncate(IMAGE_BYTES)
            _do("mkfs.ext4", "-q", "-F", "-b", "4096", "-E", "lazy_itable_init=0", image)
            self._loop = _do("losetup", "--find", "--show", image)
            queue = Path("/sys/block") / Path(self._loop).name / "queue"
            (queue / "max_sectors_kb").write_text("4")
            _do("mount", self._loop, self.mount)
        except OSError:
            self.__exit__()
            raise
        return self

    def fill(self) -> None:
        """Take all the room that the image needs to grow."""
        with self._ballast.open("wb") as file:
            free = os.statvfs(self._tmpfs)
            size = free.f_bavail * free.f_frsize
            while size >= 4096:
                try:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, size)
                except OSError:
                    size //= 2

    def empty(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def mount_again(self) -> None:
        """Room again, no cache, and a file system that is consistent, whatever happened to it."""
        self.empty()
        _do("umount", self.mount)
        _do("e2fsck", "-f", "-y", self._loop, ok=(0, 1))
        _do("mount", self._loop, self.mount)

    def __exit__(self, *_: object) -> None:
        self.empty()
        subprocess.run(["umount", "-l", str(self.mount)], capture_output=True, check=False)
        if self._loop:
            subprocess.run(["losetup", "-d", self._loop], capture_output=True, check=False)
        subprocess.run(["umount", "-l", str(self._tmpfs)], capture_output=True, check=False)


def on_ext4(directory: Path, seed: int, rounds: int) -> tuple[Run, int]:
    """Let syncs of a real file system fail; returns the run and how many did."""
    random = Random(seed)
    failed = 0
    with Ext4(directory) as disk:
        # The reserve of the guard is off: the ext4 believes that it has room.
        run = Run(
            directory / "run",
            kills=0,
            seed=seed,
            data=disk.mount / "data",
            options={"disk_reserve_bytes": 0},
        )
        run.without.add("admin")
        run.topic_changes["durability"] = "always"  # the others may lose what was not synced
        run.set_the_stage()
        while failed < rounds and not run.checker.anomalies:
            with run.victim("load") as victim:
                victim.opened.wait(START_S)
                time.sleep(0.3 + random.random())
                disk.fill()
                code = victim.end(START_S)
                if code != EXIT_FAILED:
                    run.problem(f"a sync was to fail on a full disk and the code was {code}")
                failed += 1
            disk.mount_again()
            with run.victim("load") as victim:
                victim.opened.wait(START_S)
                time.sleep(0.3)
                run.kill(victim)
        if not run.checker.anomalies:
            run.finish()
    return run, failed


def run(options: RunOptions) -> Outcome:
    outcome = Outcome()
    counts: Counter[str] = Counter()
    absent = [why for why in (fsync_fault.absence(), ext4_absence()) if why]
    outcome.absent = "; ".join(absent) or None
    ext4 = 0 if ext4_absence() else max(1, round(options.amount * EXT4_SHARE))
    number, by_strace = 0, 0
    if ext4:
        directory = Path(tempfile.mkdtemp(prefix="headrace-ext4-"))
        one, failed = on_ext4(directory, options.seed, ext4)
        outcome.amount += failed
        collect(outcome, one, counts)
        options.progress(f"{failed} failed syncs of an ext4, {len(outcome.anomalies)} anomalies")
        if not outcome.anomalies:
            shutil.rmtree(directory, ignore_errors=True)
    while not fsync_fault.absence() and outcome.amount < options.amount and not outcome.anomalies:
        rounds = min(ROUNDS_A_RUN, options.amount - outcome.amount)
        directory = Path(tempfile.mkdtemp(prefix="headrace-syncs-"))
        one = Run(directory, kills=0, seed=options.seed + number)
        fsync_fault.go(one, rounds)
        number += 1
        by_strace += rounds
        outcome.amount += rounds
        collect(outcome, one, counts)
        options.progress(f"{by_strace} failed syncs by strace, {len(outcome.anomalies)} anomalies")
    outcome.figures = {"on a full ext4": ext4, "by strace": by_strace, **figures(counts)}
    return outcome


SCENARIO = Scenario(
    name="failing-syncs",
    what="fdatasync fails: the broker stops, the next start trusts no cache, nothing answered is lost",
    unit="failed syncs",
    amount=200,
    quick=4,
    run=run,
)
