"""Examines and repairs a data directory on which no broker runs.

:func:`examine` reads everything and changes nothing; :func:`repair` applies the remedies that a
report offers, and only those.

Rules:
- The directory's lock is held throughout, so no broker writes meanwhile.
- A repair examines again what it is about to change, and acts only on findings that are still
  exactly the same: a broker may have run in between.
- Files that the doctor does not understand are reported and left alone. A batch of a newer version is
  not damage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.clock import Clock
from headrace.doctor.examination import Examination, Progress, looks_like_data
from headrace.doctor.findings import Action, Finding, Report
from headrace.errors import InvalidArgument, NotFound, StorageFull
from headrace.files import Files
from headrace.log.directory import DataDirectory


def examine(
    data_dir: Path, files: Files | None = None, *, progress: Progress | None = None
) -> Report:
    """Read everything. :class:`DirectoryLocked` when a broker runs there."""
    files = files or Files()
    with locked(data_dir, files):
        examination = Examination(data_dir, files, progress)
        examination.run()
    return examination.report


def repair(data_dir: Path, report: Report, files: Files | None = None) -> list[Action]:
    """Apply the remedies of the report's repairable findings. Offsets stay, and no data is deleted.

    Findings that have changed since the report are left alone; examine again to see them.
    """
    files = files or Files()
    wanted = set(report.repairable)
    with locked(data_dir, files):
        examination = Examination(data_dir, files)
        examination.run(only={_directory_of(data_dir, finding) for finding in wanted})
        # A remedy is applied only if the report showed everything that it would change.
        chosen = {
            remedy: findings[0]
            for remedy, findings in examination.offered.items()
            if wanted.issuperset(findings)
        }
        _check_room(data_dir, files, [remedy.bytes_written for remedy in chosen])
        return [
            Action(finding.code, finding.file, remedy.apply(files))
            for remedy, finding in chosen.items()
        ]


def _directory_of(data_dir: Path, finding: Finding) -> Path:
    names = [finding.topic, finding.partition]
    return data_dir.joinpath(*(str(name) for name in names if name is not None))


def _check_room(data_dir: Path, files: Files, sizes: list[int]) -> None:
    """A copy of each damaged segment stays; while one is being rewritten there is one more."""
    needed = sum(sizes) + max(sizes, default=0)
    if files.free_bytes(data_dir) < needed:
        raise StorageFull(
            f"the repair needs {needed:,} bytes on the disk, because it keeps the damaged files; "
            "make room and run it again",
            retryable=False,
        )


@contextmanager
def locked(data_dir: Path, files: Files) -> Iterator[None]:
    """Hold the lock of a data directory, or say why not."""
    if not files.exists(data_dir):
        raise NotFound(f"directory {data_dir} does not exist", code="data_dir_not_found")
    if not files.is_directory(data_dir):
        raise InvalidArgument(
            f"{data_dir} is a file; name the data directory, or use --dump to look into one file",
            code="not_a_data_directory",
        )
    if not looks_like_data(data_dir, files):
        raise InvalidArgument(
            f"{data_dir} is not a data directory: no broker has written to it",
            code="not_a_data_directory",
        )
    directory = DataDirectory(data_dir, files, Clock())
    directory.acquire(to_read=True)
    try:
        yield
    finally:
        directory.release()
