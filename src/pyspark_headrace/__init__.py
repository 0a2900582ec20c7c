"""``format("headrace")``, which Spark finds by itself: no jar, no registration.

Spark imports every top-level module named ``pyspark_*`` and takes its ``DefaultSource``. One such
module that fails to import hides all of them, so this one imports nothing: the class is looked up when
Spark asks for it, and where the ``spark`` extra is not installed the module has none.

A module has one ``DefaultSource``, so each of the other formats (``headrace_lake``,
``headrace_archive``) has a module of its own beside this one.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def default_source(module: str, source: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module whose ``DefaultSource`` is this class."""

    def look_up(name: str) -> Any:
        if name != "DefaultSource":
            raise AttributeError(f"this module has no attribute {name!r}")
        try:
            return getattr(import_module(module), source)
        except ImportError as error:
            raise AttributeError(
                f"Headrace's source for Spark needs more than is installed ({error}): "
                "install it where this Python looks for modules"
            ) from None

    return look_up


__getattr__ = default_source("headrace.spark.source.data_source", "HeadraceDataSource")
