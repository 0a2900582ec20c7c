"""Three nodes over three Kafka nodes, broken in every way that we know of, under load.

``make faults-cluster`` runs it: ``python -m tests.faults cluster [--seed N] [--amount N]``.

    clients (threads here) ──▶ proxy ──▶ Headrace nodes ──▶ proxy ──▶ Kafka nodes
                                             └──▶ proxy ──▶ other Headrace nodes

``plan.py`` says what is broken when; it follows from the seed alone. ``stage.py`` has the processes and breaks them, ``proxy.py``
cuts and slows what goes between them. ``load.py`` has the clients, which are those of ``tests/crash`` over the network; they write the
history, and the checker of ``tests/crash`` decides about it. ``pauses.py`` measures how long publishes had to wait.
"""
