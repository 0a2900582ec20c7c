"""One table over all history: archived offsets from an archive's table, all others from the log.

::

    archives     the table of an archive: its name, its files, the offset at a time
    files        rows of single files as the columns that a query asks for
    store        log and archive as one store of topics
    reader       the batch reader of ``format("headrace")`` with the option ``history``

Every offset is read once: from the table if the table holds it, else from the log. Archive and retention go
on meanwhile. Retention deletes an offset only after the archive's subscription has moved past it, and
that moves after the commit to the table. So an offset is always in one of the two:

- The log is looked at first, the table after it: an offset that the log has deleted by then is in the
  table by then.
- The end is the log's. Offsets that the archive adds after that look are left out.
- A task that finds its offsets deleted from the log looks into the table again (:class:`~.store.HistoryStore`).
- A table's files are kept for a day after a compaction has replaced them, so a query may read them to its end.

An offset that is in neither is data loss, as in any other query (``failOnDataLoss``): the archive's subscription
was deleted, or ``retain_unread`` was off.
"""
