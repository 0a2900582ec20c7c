"""The topics of a data directory: created, listed, opened and deleted."""

import errno
from pathlib import Path
from random import Random

import pytest

from headrace.errors import StorageFull
from headrace.log.columns import Columns
from headrace.log.interface import Append, Log, TopicRecord
from headrace.log.storage import DiskStorage, MemoryStorage
from headrace.model import TopicSettings
from tests.fakes import FakeClock, FakeLoop, FaultyFiles, InlineWorkers, SimulatedFiles

DATA = Path("data")
TWO = TopicRecord("orders", TopicSettings(partitions=2), 4711, 1_700_000_000_000)


class Rig:
    def __init__(self) -> None:
        self.disk = SimulatedFiles()
        self.files = FaultyFiles(self.disk)
        self.files.make_directory(DATA)
        self.loop = FakeLoop()
        self.storage = self.open()

    def open(self) -> DiskStorage:
        return DiskStorage(
            DATA, files=self.files, clock=FakeClock(self.loop), loop=self.loop, random=Random(0),
            workers=InlineWorkers(self.loop), on_failure=lambda error: None,
        )  # fmt: skip

    def publish(self, log: Log) -> None:
        log.append(Append(Columns([b"x"]), None, lambda entry: None))
        self.loop.run_until_idle()


def test_a_topic_is_listed_as_it_was_stored() -> None:
    """With its settings, its incarnation and its time; changed ones replace the old."""
    rig = Rig()
    assert len(rig.storage.create(TWO)) == 2
    assert rig.open().topics(TopicSettings()) == [TWO]
    changed = TWO._replace(settings=TWO.settings.but({"retention_hours": 1.0}))
    rig.storage.save(changed)
    assert rig.open().topics(TopicSettings()) == [changed]


def test_an_opened_log_continues_where_it_ended() -> None:
    """Each partition by itself; one that does not exist is empty."""
    rig = Rig()
    log, _ = rig.storage.create(TWO)
    rig.publish(log)
    storage = rig.open()
    assert [storage.open(TWO, number).end_offset for number in range(3)] == [1, 0, 0]


def test_a_topic_in_memory_has_its_settings_on_disk_alone() -> None:
    """It is listed after a start, and empty."""
    rig = Rig()
    topic = TWO._replace(settings=TopicSettings(durable=False))
    [log] = rig.storage.create(topic)
    rig.publish(log)
    assert not log.durable
    storage = rig.open()
    assert storage.topics(TopicSettings()) == [topic]
    assert storage.open(topic, 0).end_offset == 0


def test_nothing_is_left_of_a_topic_that_could_not_be_created() -> None:
    """A full disk while its second partition is made."""
    rig = Rig()
    rig.files.fail("mkdir", 3, errno.ENOSPC)
    with pytest.raises(OSError, match="No space"):
        rig.storage.create(TWO)
    assert rig.files.names(DATA) == []


def test_a_deleted_topic_is_gone_for_the_next_start() -> None:
    """At once; its files go when its logs are closed, or with the next start."""
    rig = Rig()
    rig.storage.create(TWO)
    finished: list[bool] = []
    deletion = rig.storage.delete(TWO)
    assert deletion.unsure is None
    assert rig.files.names(DATA) == ["@deleted"]
    deletion.finish(lambda: finished.append(True))
    rig.loop.run_until_idle()
    assert finished == [True]
    assert rig.files.names(DATA / "@deleted") == []
    rig.storage.create(TWO)
    rig.storage.delete(TWO)  # and the process ends here
    assert rig.open().topics(TopicSettings()) == []
    assert rig.files.names(DATA) == []


def test_a_refused_deletion_changes_nothing() -> None:
    """The topic stays, with its files."""
    rig = Rig()
    rig.storage.create(TWO)
    rig.files.fail("rename", 1, errno.ENOSPC)
    with pytest.raises(StorageFull):
        rig.storage.delete(TWO)
    assert rig.open().topics(TopicSettings()) == [TWO]


def test_without_a_directory_nothing_is_stored() -> None:
    """Topics are made, and no start knows them."""
    loop = FakeLoop()
    storage = MemoryStorage(clock=FakeClock(loop), loop=loop)
    assert [log.durable for log in storage.create(TWO)] == [False, False]
    storage.save(TWO)
    assert storage.topics(TopicSettings()) == []
    finished: list[bool] = []
    storage.delete(TWO).finish(lambda: finished.append(True))
    assert finished == [True]
