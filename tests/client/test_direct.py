"""Reading the broker's files: exactly what the socket would have brought, or the socket."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import BrokerClient, errors
from headrace.client import direct
from headrace.client.direct import open_file
from headrace.client.reader import BatchReader
from headrace.files import machine
from headrace.log.batch import Batch
from headrace.testing import RunningServer, running_server
from headrace.wire.binary import Type

pytestmark = pytest.mark.skipif(machine() is None, reason="this system has no name")


def values(found: Iterator[list[Batch]]) -> list[bytes]:
    return [value for batches in found for batch in batches for value in batch.values()]


def fill(client: BrokerClient, count: int, each: int = 50) -> list[bytes]:
    stored = [b"%06d" % number + b"." * 500 for number in range(count)]
    for start in range(0, count, each):
        client.publish_many("orders", stored[start : start + each], partition=0)
    return stored


def segments(server: RunningServer) -> list[Path]:
    return sorted((server.data_dir / "orders" / "0").glob("*.log"))


def descriptors_of(path: Path) -> int:
    """How many this process has open."""
    found = 0
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # another thread has closed it
            found += os.readlink(fd) == str(path)
    return found


def answer(reader: BatchReader, offset: int = 0, system: str | None = None) -> dict[str, str]:
    question = {"topic": "orders", "offset": str(offset), "direct": system or machine() or ""}
    return reader.ask(Type.FETCH, question)


def test_the_bytes_come_from_the_file(server: RunningServer, client: BrokerClient) -> None:
    """All of them; the broker is asked twice for each segment: which file, and whether it is that."""
    client.create_topic("orders", segment_bytes=64 << 10)
    stored = fill(client, 600)
    assert len(segments(server)) > 3
    with BatchReader([server.address]) as reader:
        assert values(reader.read("orders", 0, 0, 600)) == stored
        assert reader.direct_bytes > 600 * 506
        assert reader._sequence == 2 * len(segments(server))


@pytest.mark.parametrize("each", [1, 50, 200], ids=["tiny", "small", "large"])
def test_any_part(server: RunningServer, client: BrokerClient, each: int) -> None:
    """The first batch holds the first offset, the last one the last; there is no gap between them."""
    client.create_topic("orders", segment_bytes=150 << 10)
    stored = fill(client, 600, each)
    with BatchReader([server.address]) as reader:
        for start, end in [(0, 1), (0, 600), (199, 201), (599, 600), (321, 478)]:
            found = [batch for batches in reader.read("orders", 0, start, end) for batch in batches]
            first = found[0].base_offset
            assert first <= start
            assert found[-1].base_offset < end <= found[-1].end_offset
            assert values(iter([found])) == stored[first : found[-1].end_offset]
        assert reader.direct_bytes > 0


def test_the_broker_may_be_gone(server: RunningServer, client: BrokerClient) -> None:
    """Whoever has the file open needs nobody for it."""
    stored = fill(client, 600)
    with BatchReader([server.address], timeout=5) as reader:
        found = reader.read("orders", 0, 0, 600)
        some = next(found)
        server.kill()
        assert values(iter([some, *found])) == stored


def test_retention_may_take_the_file(server: RunningServer, client: BrokerClient) -> None:
    """An open one is read on; one that is gone is asked for, and the broker says that it is."""
    client.create_topic("orders", segment_bytes=64 << 10)
    stored = fill(client, 600)
    with BatchReader([server.address], timeout=5) as reader:
        found = reader.read("orders", 0, 0, 600)
        some = next(found)
        log = server.engine.partition("orders", 0).log
        server.call(log.drop_before, 500)
        rest: list[list[Batch]] = []
        with pytest.raises(errors.OffsetOutOfRange):
            rest.extend(found)
        seen = values(iter([some, *rest]))
        assert 100 <= len(seen) < 500
        assert seen == stored[: len(seen)]


def test_what_was_not_promised_is_not_read(server: RunningServer, client: BrokerClient) -> None:
    """Who asks for more than there is gets what there is, and the broker's word."""
    stored = fill(client, 100)
    with BatchReader([server.address], timeout=5) as reader:
        found = reader.read("orders", 0, 0, 150)
        seen: list[list[Batch]] = []
        with pytest.raises(errors.OffsetOutOfRange, match="ends at 100"):
            seen.extend(found)
        assert values(iter(seen)) == stored


@pytest.mark.parametrize("each", [50, 200], ids=["small", "large"])
def test_damage_is_left_to_the_broker(
    server: RunningServer, client: BrokerClient, each: int
) -> None:
    """What is before it is read; the error names the offsets."""
    stored = fill(client, 600, each)
    (path,) = segments(server)
    raw = path.read_bytes()
    at = raw.index(stored[230])
    path.write_bytes(raw[:at] + b"?" + raw[at + 1 :])
    with BatchReader([server.address], timeout=5) as reader:
        seen: list[list[Batch]] = []
        with pytest.raises(errors.DataCorrupt, match=f"offsets 200 to {199 + each} "):
            seen.extend(reader.read("orders", 0, 0, 600))
        assert values(iter(seen)) == stored[:200]


def test_another_system_is_told_nothing(server: RunningServer, client: BrokerClient) -> None:
    """Where the files are is the business of those who are there."""
    fill(client, 10)
    with BatchReader([server.address]) as reader:
        assert "file" in answer(reader)
        assert "file" not in answer(reader, system="another")
        assert "file" not in answer(reader, offset=10)


def test_a_file_that_is_another_one_is_not_read(
    server: RunningServer, client: BrokerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same path in another container, or after the topic was created again."""
    stored = fill(client, 100)
    with BatchReader([server.address]) as reader:
        told = answer(reader)
        other = tmp_path / "other.log"
        other.write_bytes(Path(told["file"]).read_bytes())
        assert open_file({**told, "file": str(other)}) is None
        assert open_file({**told, "file": str(tmp_path / "none")}) is None
        before = descriptors_of(Path(told["file"]))
        assert open_file({**told, "inode": "0:0"}) is None
        assert descriptors_of(Path(told["file"])) == before

        def refused(path: str, flags: int) -> int:
            raise PermissionError(13, "not yours", path)

        monkeypatch.setattr(direct.os, "open", refused)
        assert values(reader.read("orders", 0, 0, 100)) == stored
        assert reader.direct_bytes == 0


def test_descriptors_are_given_back(server: RunningServer, client: BrokerClient) -> None:
    """Also by who stops in the middle."""
    fill(client, 600, each=200)
    (path,) = segments(server)
    with BatchReader([server.address]) as reader:
        before = descriptors_of(path)
        for _ in range(5):
            found = reader.read("orders", 0, 0, 600)
            next(found)
            found.close()  # type: ignore[attr-defined]
            values(reader.read("orders", 0, 0, 600))
        assert descriptors_of(path) == before


def test_a_broker_without_files() -> None:
    """In memory there is nothing to point at."""
    with running_server(memory=True) as server, server.client() as client:
        stored = fill(client, 100)
        with BatchReader([server.address]) as reader:
            assert values(reader.read("orders", 0, 0, 100)) == stored
            assert reader.direct_bytes == 0


def test_a_file_that_came_in_the_place_of_another(
    server: RunningServer, client: BrokerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The topic is created again between the broker's answer and our opening of the file: whether or not
    the new file got the old one's number, nothing of it is read."""
    for number in range(5):
        topic = f"orders{number}"
        client.publish_many(topic, [b"old"] * 20)
        incarnation = client.positions(topic)[topic][0]["incarnation"]

        def too_late(answer: dict[str, str], topic: str = topic) -> direct.OpenFile | None:
            client.delete_topic(topic)
            client.publish_many(topic, [b"new"] * 20)
            return open_file(answer)

        with BatchReader([server.address], timeout=5) as reader:
            with monkeypatch.context() as patch:
                patch.setattr("headrace.client.reader.open_file", too_late)
                with pytest.raises(errors.TopicNotFound, match="created again"):
                    values(reader.read(topic, 0, 0, 20, incarnation=incarnation))
            assert reader.direct_bytes == 0


def test_a_gap_is_not_skipped(server: RunningServer, client: BrokerClient) -> None:
    """A batch that is cut out of a file is as good as damaged."""
    client.create_topic("orders", segment_bytes=64 << 10)
    stored = fill(client, 400, each=10)
    path = segments(server)[0]
    raw = path.read_bytes()
    at = [raw.index(stored[number]) for number in (50, 60)]
    size = at[1] - at[0]
    head = raw.rindex(raw[:4], 0, at[0])
    path.write_bytes(raw[:head] + raw[head + size :])
    with BatchReader([server.address], timeout=5) as reader:
        seen: list[list[Batch]] = []
        with pytest.raises(errors.DataCorrupt):
            seen.extend(reader.read("orders", 0, 0, 400))
        assert values(iter(seen)) == stored[:50]


def test_a_path_that_is_no_text(tmp_path: Path) -> None:
    """It cannot be said in a property, so the socket is used."""
    directory = tmp_path / os.fsdecode(b"caf\xe9")
    with running_server(directory) as server, server.client() as client:
        stored = fill(client, 100)
        with BatchReader([server.address]) as reader:
            assert values(reader.read("orders", 0, 0, 100)) == stored
            assert reader.direct_bytes == 0


def test_what_else_has_that_path_is_not_waited_for(
    server: RunningServer, client: BrokerClient, tmp_path: Path
) -> None:
    """A pipe, for one."""
    fill(client, 10)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with BatchReader([server.address]) as reader:
        told = answer(reader)
    assert open_file({**told, "file": str(pipe)}) is None
    assert open_file({**told, "file": str(tmp_path)}) is None
    assert open_file({**told, "file": "a\0b"}) is None
