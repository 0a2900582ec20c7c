"""``headrace backup``, ``restore``, ``verify``: generations of a whole broker (``headrace.backup``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.backup.copying import Taken, take
from headrace.backup.manifest import BackupDirectory
from headrace.backup.restoring import restore as restore_generation
from headrace.backup.sources import BackupSource, BrokerSource, DirectorySource
from headrace.backup.verifying import BackupVerdict
from headrace.backup.verifying import verify as verify_backup
from headrace.cli.connecting import (
    BrokerPlace,
    connected,
    login_as,
    with_broker_place,
)
from headrace.cli.printing import (
    AsJson,
    complain,
    count_of,
    print_json,
    print_listing,
    progress_bar,
    say,
    size,
    when,
)
from headrace.client.address import find_brokers
from headrace.client.reader import BatchReader
from headrace.client.tls import make_tls
from headrace.errors import DataCorrupt, HeadraceError, InvalidArgument, StorageFailed
from headrace.notation import size_of

SHOWN_MAX = 20
"""Flaws that are printed; --json has all of them."""
Generation = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="The number of a generation; see backup --list."),
]
BackupPath = Annotated[Path, typer.Argument(metavar="BACKUP_DIR", help="The backup.")]


@with_broker_place
def backup(
    place: BrokerPlace,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The backup; created if it does not exist.")
    ],
    data: Annotated[
        Path | None,
        typer.Option(metavar="DATA_DIR", help="Copy the directory of a stopped broker."),
    ] = None,
    keep: Annotated[int, typer.Option(metavar="N", min=1, help="Generations to keep.")] = 7,
    rate: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Copy at most this much a second: 50MB.")
    ] = None,
    no_access: Annotated[
        bool, typer.Option("--no-access", help="Leave out users, tokens and their rights.")
    ] = False,
    list_: Annotated[
        bool, typer.Option("--list", help="List the generations, copy nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Add a generation to a backup of a broker. The broker may keep running.

    A generation is one point in time of everything: messages, subscriptions and their positions,
    delayed messages, dead letters, settings of topics, users. Only new data is copied. If a backup is
    killed, all earlier generations stay complete, and the next backup continues where it stopped. You
    need the right admin over everything.

    \b
    Examples:
      headrace backup /backup/headrace
      headrace backup /backup/headrace --keep 30 --rate 50MB
      headrace backup /backup/headrace --data /var/lib/headrace
      headrace backup /backup/headrace --list

    \b
    Exit codes:
      0  the generation is complete
      1  it was made, but some records of the broker are damaged and are marked as lost in it
      2  it was not made; earlier generations are unchanged
    """
    with disk_errors():
        if list_:
            _list(BackupDirectory(directory), as_json)
            return
        with (
            progress_bar("copying", hidden=as_json) as bar,
            _source(place, data, access=not no_access) as source,
        ):
            taken = take(
                BackupDirectory(directory),
                source,
                keep=keep,
                rate=_rate(rate),
                progress=lambda done, total: bar.show(done, total, "message"),
            )
    if as_json:
        print_json(_taken(taken))
    else:
        _print_taken(directory, taken)
    if taken.damaged:
        raise typer.Exit(1)


@contextmanager
def disk_errors() -> Iterator[None]:
    """An error of the disk as one line."""
    try:
        yield
    except (BrokenPipeError, HeadraceError):  # a RequestTimeout is an OSError, too
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise StorageFailed(f"{where}{error.strerror or error}", retryable=False) from error


@contextmanager
def _source(place: BrokerPlace, data: Path | None, *, access: bool) -> Iterator[BackupSource]:
    if data is not None:  # stronger than an address, which may be in the environment
        yield DirectorySource(data, access=access)
        return
    host, port, _ = find_brokers(place.server)[0]
    with connected(place) as client, batch_reader(place) as reader:
        yield BrokerSource(f"{host}:{port}", client, reader, access=access)


def batch_reader(place: BrokerPlace) -> BatchReader:
    brokers = find_brokers(place.server)
    user, password = login_as(place.token, place.user)
    context = make_tls(any(each.tls for each in brokers), place.ca)
    addresses = [(host, port) for host, port, _ in brokers]
    return BatchReader(addresses, token=place.token, user=user, password=password, tls=context)


def _rate(text: str | None) -> float | None:
    if text is None:
        return None
    found = size_of(text.removesuffix("/s"))
    if not found:
        raise InvalidArgument(f"--rate takes a size for each second, such as 50MB, not {text!r}")
    return float(found)


def _taken(taken: Taken) -> dict[str, Any]:
    manifest = taken.manifest
    return {
        "generation": manifest.generation,
        "time": manifest.time,
        "topics": len(manifest.topics),
        "messages": manifest.records,
        "bytes": manifest.size,
        "copied_bytes": taken.copied,
        "left_out": manifest.left_out,
        "damaged": [_range(*each) for each in taken.damaged],
        "copied_again": taken.missing,
        "forgotten": taken.forgotten,
        "access": manifest.access is not None,
    }


def _range(topic: str, partition: int, first: int, end: int) -> dict[str, Any]:
    return {"topic": topic, "partition": partition, "first": first, "end": end}


def _print_taken(directory: Path, taken: Taken) -> None:
    manifest = taken.manifest
    for topic, partition, first, end in taken.damaged[:SHOWN_MAX]:
        complain(
            f"{topic}/{partition}: offsets {first} to {end - 1} are damaged on the broker, and marked as "
            "lost in the backup; 'headrace doctor' says more"
        )
    for name in taken.missing[:SHOWN_MAX]:
        complain(f"{name} was missing or cut short in the backup; it was copied again")
    for topic in manifest.left_out:
        complain(f"topic {topic} was deleted meanwhile, and is left out")
    if taken.began > 1:
        complain("the broker was lost meanwhile: the point in time is later than the beginning")
    say(
        f"Generation {manifest.generation} in {directory}: {count_of(manifest.records, 'message')} of "
        f"{count_of(len(manifest.topics), 'topic')} at {when(manifest.time)} UTC, "
        f"{size(manifest.size)}, {size(taken.copied)} copied."
    )


def _list(directory: BackupDirectory, as_json: bool) -> None:
    directory.check()
    rows: list[dict[str, Any]] = []
    for number in directory.numbers():
        try:
            found = directory.load(number)
        except DataCorrupt as error:
            rows.append({"generation": number, "damaged": error.message})
            continue
        rows.append(
            {
                "generation": number,
                "time": found.time,
                "topics": len(found.topics),
                "messages": found.records,
                "bytes": found.size,
                "copied_bytes": found.copied,
                "lost": found.lost,
                "access": found.access is not None,
                "source": found.source,
            }
        )
    table = [
        {
            **row,
            "time": when(row["time"]) if "time" in row else "damaged",
            "size": size(row["bytes"]) if "bytes" in row else None,
            "copied": size(row["copied_bytes"]) if "copied_bytes" in row else None,
        }
        for row in rows
    ]
    columns = {
        "generation": "generation", "time": "time (UTC)", "topics": "topics", "messages": "messages",
        "size": "size", "copied": "copied", "lost": "lost", "access": "users", "source": "source",
    }  # fmt: skip
    print_listing(as_json, rows, table, columns, "No generations.")


# --- restoring and verifying ----------------------------------------------------------------------
def restore(
    backup: BackupPath,
    data_dir: Annotated[
        Path, typer.Argument(metavar="DATA_DIR", help="A new or empty directory for the broker.")
    ],
    generation: Generation = None,
    topics: Annotated[
        list[str] | None,
        typer.Option(metavar="TOPIC", help="Only this topic or wildcard; may be repeated."),
    ] = None,
    salvage: Annotated[
        bool,
        typer.Option("--salvage", help="Continue at damage, and mark destroyed records as lost."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Create a data directory from a generation of a backup.

    The command verifies every byte that it copies. DATA_DIR must be empty, and no broker starts on it
    before the restore is complete. With --topics, subscriptions on other topics, delayed messages and
    staged batches are left out; name dead-letter topics in full.

    \b
    Examples:
      headrace restore /backup/headrace /var/lib/headrace
      headrace restore /backup/headrace restored --generation 3 --topics orders --topics email.dlq

    \b
    Exit codes:
      0  everything was restored
      1  --salvage has restored what could be read
      2  not restored: damage, or the directory is not empty
    """
    with disk_errors(), progress_bar("restoring", hidden=as_json) as bar:
        done = restore_generation(
            BackupDirectory(backup),
            data_dir,
            generation=generation,
            topics=topics or None,
            salvage=salvage,
            progress=lambda done, total: bar.show(done, total, "byte"),
        )
    lost = sum(end - first for _, _, first, end in done.lost)
    if as_json:
        print_json(
            {
                "generation": done.manifest.generation,
                "time": done.manifest.time,
                "topics": done.topics,
                "messages": done.records,
                "bytes": done.bytes,
                "lost": [_range(*each) for each in done.lost],
                "problems": done.problems,
            }
        )
    else:
        for problem in done.problems[:SHOWN_MAX]:
            complain(problem)
        gone = f", {count_of(lost, 'message')} lost" if lost else ""
        say(
            f"Restored generation {done.manifest.generation} ({when(done.manifest.time)} UTC) into "
            f"{data_dir}: {count_of(done.records - lost, 'message')} of {count_of(done.topics, 'topic')}"
            f"{gone}. "
            f"Start the broker: headrace serve --data-dir {data_dir}"
        )
        if done.manifest.access_left_out:
            complain(
                "users and tokens were left out of the backup: without them everybody may do everything"
            )
    if done.lost or done.problems:
        raise typer.Exit(1)


def verify(backup: BackupPath, generation: Generation = None, as_json: AsJson = False) -> None:
    """Read every byte of a backup, and report damage.

    All generations are verified, or one with --generation.

    \b
    Example:
      headrace verify /backup/headrace

    \b
    Exit codes:
      0  everything can be restored
      1  damage was found
      2  not verified: it is not a backup, or another command uses it
    """
    with disk_errors(), progress_bar("verifying", hidden=as_json) as bar:
        verdict = verify_backup(
            BackupDirectory(backup),
            generation,
            lambda done, total: bar.show(done, total, "byte"),
        )
    if as_json:
        print_json(
            {
                "generations": verdict.generations,
                "files": verdict.files,
                "bytes": verdict.bytes,
                "flaws": [flaw.as_dict() for flaw in verdict.flaws],
            }
        )
    else:
        _print_verdict(backup, verdict)
    if not verdict.is_good:
        raise typer.Exit(1)


def _print_verdict(backup: Path, verdict: BackupVerdict) -> None:
    for flaw in verdict.flaws[:SHOWN_MAX]:
        where = "" if flaw.topic is None else f"{flaw.topic}/{flaw.partition}: "
        numbers = ", ".join(map(str, flaw.generations))
        say(f"{where}{flaw.sentence} ({flaw.file}, generation {numbers})")
    more = len(verdict.flaws) - SHOWN_MAX
    if more > 0:
        say(f"and {count_of(more, 'flaw')} more; --json lists them all")
    numbers = ", ".join(map(str, verdict.generations))
    state = "Healthy" if verdict.is_good else f"Damage in {count_of(len(verdict.flaws), 'place')}"
    read = f"{count_of(verdict.files, 'file')}, {size(verdict.bytes)} read"
    say(f"{state}: {backup}, generation {numbers}; {read}.")
