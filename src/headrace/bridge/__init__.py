"""``headrace bridge``: copies between plain Kafka topics and Headrace topics, both ways.

    inward.py       Kafka → Headrace, exactly once
    outward.py      Headrace → Kafka, exactly once for readers of committed records
    translating.py  a Kafka record as a Headrace message, and back: pure, and nothing is lost
    kafka.py        Kafka's clients, and its errors as sentences
    routes.py       which topic goes where, which messages are skipped, and how far the copy is

Both directions keep their positions *with the output*, and so never have to agree with a second place: whoever
starts reads where the output ends, and continues there. A bridge may therefore be killed at any moment.

``confluent_kafka`` (the extra ``headrace[kafka]``) is imported only by ``kafka.py``, ``inward.py`` and ``outward.py``.
"""
