"""What Spark finds by itself: ``format("headrace")`` with no jar and no registration.

Spark imports every top-level module named ``pyspark_*`` and takes its ``DefaultSource``. One such
module that fails to import hides all of them, so this one imports nothing: the class is looked up when
it is asked for, and where the ``spark`` extra is not installed there simply is none.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "DefaultSource":
        try:
            from headrace.spark.source.data_source import HeadraceDataSource
        except ImportError as error:
            raise AttributeError(
                f"Headrace's source for Spark needs more than is installed ({error}): "
                "pip install 'headrace[spark]'"
            ) from None
        return HeadraceDataSource
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
