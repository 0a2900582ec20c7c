"""Which table lies at a path. The kinds' libraries are imported late."""

from __future__ import annotations

from pathlib import Path

from headrace.errors import InvalidArgument, NotFound
from headrace.spark.lake.stores import TablePlace, place_of
from headrace.spark.lake.table import Options, Table


def kind_of(place: TablePlace, **options: object) -> str | None:
    """The kind of the table at a place; None when there is none.

    The log of a Delta table lies with it. An Iceberg table is known to its catalog, which lies with it only on a disk.
    """
    names = {name.lower().partition(".")[0] for name in options}
    if "catalog" in names or not isinstance(place, Path):
        kind = "iceberg" if "catalog" in names else "delta"
        return kind if _table(_options(place, kind, options)).exists() else None
    if (place / "_delta_log").is_dir():
        return "delta"
    if (place / "catalog.db").is_file():
        return "iceberg"
    return None


def _options(place: TablePlace, kind: str, options: dict[str, object]) -> Options:
    return Options.of({**options, "path": str(place), "kind": kind})


def open_table(options: Options) -> Table:
    """The table of these options, whether it exists yet or not."""
    place = options.place
    found = kind_of(place) if isinstance(place, Path) else None
    if found is not None and found != options.kind and not options.has_catalog:
        raise InvalidArgument(
            f"{place} is a table of the kind {found}, not {options.kind}: give that "
            "kind, or another path",
            code="wrong_kind",
        )
    return _table(options)


def _table(options: Options) -> Table:
    if options.kind == "delta":
        from headrace.spark.lake.delta import DeltaLakeTable

        return DeltaLakeTable(options)
    from headrace.spark.lake.iceberg import IcebergLakeTable

    return IcebergLakeTable(options)


def find_table(path: str, kind: str | None = None, **options: object) -> Table:
    """The table at a path, of whatever kind it is."""
    place = place_of(path)
    found = kind or kind_of(place, **options)
    if found is None:
        looked = "it has neither _delta_log nor catalog.db"
        if not isinstance(place, Path):
            looked = "it has no _delta_log. For an Iceberg table, name its catalog (option catalog)"
        raise NotFound(f"there is no table at {place}: {looked}", code="table_not_found")
    table = open_table(_options(place, found, options))
    if not table.exists():
        raise NotFound(f"there is no {found} table at {place}", code="table_not_found")
    return table
