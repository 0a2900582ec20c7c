"""Which kind of table lies where, and the class for it. The kinds' libraries are imported late."""

from __future__ import annotations

from pathlib import Path

from headrace.errors import InvalidArgument, NotFound
from headrace.spark.lake.table import Options, Table, directory_of


def kind_of(directory: Path) -> str | None:
    """The kind of the table in a directory; None when it holds no table."""
    if (directory / "_delta_log").is_dir():
        return "delta"
    if (directory / "catalog.db").is_file():
        return "iceberg"
    return None


def open_table(options: Options) -> Table:
    """The table of these options, whether it exists yet or not."""
    found = kind_of(options.directory)
    if found is not None and found != options.kind and not options.catalog:
        raise InvalidArgument(
            f"{options.directory} is a table of the kind {found}, not {options.kind}: give that "
            "kind, or another path",
            code="wrong_kind",
        )
    if options.kind == "delta":
        from headrace.spark.lake.delta import DeltaLakeTable

        return DeltaLakeTable(options)
    from headrace.spark.lake.iceberg import IcebergLakeTable

    return IcebergLakeTable(options)


def find_table(path: str, kind: str | None = None, **options: object) -> Table:
    """The table at a path, of whatever kind it is."""
    directory = directory_of(path)
    found = kind or kind_of(directory)
    if found is None:
        raise NotFound(
            f"there is no table at {directory}: it has neither _delta_log nor catalog.db",
            code="table_not_found",
        )
    table = open_table(Options.of({"path": str(directory), "kind": found, **options}))
    if not table.exists():
        raise NotFound(f"there is no {found} table at {directory}", code="table_not_found")
    return table
