"""Examines and repairs a data directory on which no broker runs.

``commands`` has the two entrances, :func:`~commands.examine` and :func:`~commands.repair`;
``examination`` says what is checked, ``remedies`` what a repair does. This room knows the files of
``log`` and nothing of a running broker.
"""
