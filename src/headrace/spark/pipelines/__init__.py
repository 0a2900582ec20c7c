"""Pipelines that a small file declares and Spark runs until they are stopped.

::

    sections         values of a declaration, read strictly: errors name the file, the pipeline, the key
    declaration      a pipeline: inputs, a transformation, an output
    files            a TOML or Python file becomes pipelines
    functions        ``@pipeline`` and ``each_row`` for Python files
    inputs           topics and tables become DataFrames; rows that fail are set apart
    outputs          a DataFrame becomes messages or a table
    dead_letters     rows that failed become messages with the reason
    planning         a pipeline becomes queries, checked but not started
    running          starts them, watches over them, stops them after a whole batch
    reporting        their progress, for the terminal and for the broker

docs/pipelines.md describes a file: its keys, the columns, rows that fail, exactly once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.spark.late_imports import late_imports

if TYPE_CHECKING:
    from headrace.spark.pipelines.files import PipelineFile, load
    from headrace.spark.pipelines.functions import each_row, pipeline

__all__ = ["PipelineFile", "each_row", "load", "pipeline"]

__getattr__ = late_imports(
    __name__,
    {"PipelineFile": "files", "each_row": "functions", "load": "files", "pipeline": "functions"},
)
