"""SQL over topics: ``headrace sql``, and the same in Python (:class:`TopicSql`).

::

    topic_sql               topics as views, created when a statement names them
    catalog  schema         which topics exist, and which columns their records have
    text                    statements, names and declared schemas as a user types them
    running  output         a query that can be watched and cancelled; its rows as a table or a file
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.spark.late_imports import late_imports

if TYPE_CHECKING:
    from headrace.spark.sql.topic_sql import TopicSql

__all__ = ["TopicSql"]

__getattr__ = late_imports(__name__, {"TopicSql": "topic_sql"})
