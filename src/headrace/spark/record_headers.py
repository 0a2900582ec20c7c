"""Headers of records as a column of Spark."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

if TYPE_CHECKING:
    from pyspark.sql import Column

HEADERS = "array<struct<key:string,value:binary>>"


def with_headers(
    own: Column | None, added: Mapping[str, Column], replaced: Collection[str] = ()
) -> Column:
    """A record's own headers, and after them the added ones, but none whose value is null.

    An own header with the name of an added one, or with a name in ``replaced``, is left out.
    """
    pairs = [
        F.struct(F.lit(name).alias("key"), value.cast("string").cast("binary").alias("value"))
        for name, value in added.items()
    ]
    new = F.filter(F.array(*pairs), lambda header: header["value"].isNotNull()).cast(HEADERS)
    if own is None:
        return new
    names = [*added, *replaced]
    kept = F.filter(own.cast(HEADERS), lambda header: ~header["key"].isin(names))
    return F.concat(F.coalesce(kept, F.array().cast(HEADERS)), new)
