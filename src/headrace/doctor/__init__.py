"""Examines and repairs a data directory on which no broker runs.

``commands`` has the entry points :func:`~commands.examine` and :func:`~commands.repair`; ``dump``
lists the batches of one file; ``examination`` holds the checks, ``findings`` what they report and
``remedies`` what a repair does. This room knows the files of ``log`` and no running broker.
"""
