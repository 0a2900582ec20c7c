"""Where records are read: a broker and a directory say the same, and lose and complain alike."""

import pickle
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace import BrokerClient, errors
from headrace.log import batch as batches
from headrace.log.batch import HEADER_BYTES
from headrace.log.columns import Columns
from headrace.spark.connection import ConnectionOptions
from headrace.spark.source.directory import DirectoryStore, unfinished_commits
from headrace.spark.source.options import SourceOptions
from headrace.spark.source.positions import DataLoss, Extent, TaskSpan, TopicExtents
from headrace.spark.source.stores import BrokerStore, Store, open_store, records
from headrace.testing import RunningServer, running_server


def fill(
    client: BrokerClient, topic: str, count: int, *, partition: int = 0, each: int = 10
) -> None:
    for start in range(0, count, each):
        values = [b"%05d" % number for number in range(start, min(start + each, count))]
        client.publish_many(topic, values, partition=partition)


def read(
    store: Store, topic: str, start: int, end: int, *, partition: int = 0, fail: bool = True
) -> list[bytes]:
    incarnation = store.topics([topic])[topic].incarnation
    span = TaskSpan(topic, partition, start, end, incarnation)
    return [
        value
        for part in records(store, span, fail_on_data_loss=fail)
        for value in part.batch.values()[part.start : part.stop]
    ]


def numbers(first: int, end: int) -> list[bytes]:
    return [b"%05d" % number for number in range(first, end)]


def broker_store(server: RunningServer, *, direct: bool = False) -> BrokerStore:
    return BrokerStore(ConnectionOptions((server.address,), timeout=10), direct=direct)


@pytest.fixture(params=["broker", "direct", "directory"])
def opened(request: pytest.FixtureRequest, server: RunningServer) -> Iterator[Callable[[], Store]]:
    """A store over the server's data, which is stopped first where no broker is needed."""
    stores: list[Store] = []

    def open_it() -> Store:
        if request.param == "directory":
            server.stop()
            stores.append(DirectoryStore(server.data_dir))
        else:
            stores.append(broker_store(server, direct=request.param == "direct"))
        return stores[-1]

    yield open_it
    for store in stores:
        store.close()


def test_what_there_is(opened: Callable[[], Store], client: BrokerClient) -> None:
    """Names, lists and wildcards; internal topics only by their name."""
    client.create_topic("orders.eu", partitions=2)
    client.create_topic("orders.us")
    client.create_topic("other")
    fill(client, "orders.eu", 30, partition=1)
    client.publish("orders.us", b"later", delay=100)
    told = client.positions(["orders.*"])
    store = opened()
    found = store.topics(["orders.*"])
    assert list(found) == ["orders.eu", "orders.us"]
    assert found["orders.eu"].incarnation == told["orders.eu"][0]["incarnation"]
    extents = found["orders.eu"].partitions
    assert (extents[0].start, extents[0].end) == (0, 0)
    assert (extents[1].start, extents[1].end, extents[1].bytes) == (
        0,
        30,
        told["orders.eu"][1]["bytes"],
    )
    assert list(store.topics(["other", "orders.us", "orders.>"])) == [
        "orders.eu",
        "orders.us",
        "other",
    ]
    assert list(store.topics(["__scheduled"])) == ["__scheduled"]
    assert store.topics(["nothing.*"]) == {}
    with pytest.raises(errors.TopicNotFound, match="nothing"):
        store.topics(["nothing"])


@pytest.mark.parametrize("direct", [False, True])
def test_a_user_reads_what_it_may_browse(direct: bool) -> None:
    """The driver's client and the executors' readers log in with its password."""
    with running_server(token="root-token") as server, server.client() as root:
        fill(root, "orders", 20)
        fill(root, "secrets", 1)
        root.create_user("alice", password="correct-horse", grants=["browse:orders"])
        options = ConnectionOptions(
            (server.address,), user="alice", password="correct-horse", timeout=10
        )
        store = BrokerStore(pickle.loads(pickle.dumps(options)), direct=direct)
        try:
            assert read(store, "orders", 0, 20) == numbers(0, 20)
            with pytest.raises(errors.HeadraceError) as caught:
                store.topics(["secrets"])
            assert caught.value.code in ("forbidden", "topic_not_found")
        finally:
            store.close()


def test_reading_a_part(opened: Callable[[], Store], client: BrokerClient) -> None:
    """From any offset to any other, over many segments."""
    client.create_topic("orders", segment_bytes=4096)
    fill(client, "orders", 1000)
    store = opened()
    assert read(store, "orders", 0, 1000) == numbers(0, 1000)
    assert read(store, "orders", 495, 503) == numbers(495, 503)
    assert read(store, "orders", 999, 1000) == numbers(999, 1000)
    assert read(store, "orders", 7, 7) == []


def test_times(opened: Callable[[], Store], client: BrokerClient) -> None:
    """The first record at or after a time; the end if there is none."""
    client.create_topic("orders", segment_bytes=4096)
    for number in range(200):
        client.publish_many(
            "orders", [b"x" * 50] * 3, timestamps=[1000 * number + n for n in range(3)]
        )
    store = opened()

    def at(time: int) -> int | None:
        return store.topics(["orders"], time)["orders"].partitions[0].at

    assert [at(time) for time in (0, 1, 2, 3, 1000, 99_999, 199_002, 199_003)] == [
        0, 1, 2, 3, 3, 300, 599, 600,
    ]  # fmt: skip


def test_a_store_travels(opened: Callable[[], Store], client: BrokerClient) -> None:
    """What it opened stays behind."""
    fill(client, "orders", 10)
    store = opened()
    assert read(store, "orders", 0, 10) == numbers(0, 10)
    again = pickle.loads(pickle.dumps(store))
    assert read(again, "orders", 0, 10) == numbers(0, 10)
    again.close()


def test_waiting(opened: Callable[[], Store], client: BrokerClient) -> None:
    """Nothing new: not before the time is up. Something that is not known: at once."""
    fill(client, "orders", 10)
    store = opened()
    known = store.topics(["orders"])
    assert not store.wait(known, ["orders"], 0.05)
    before = {"orders": TopicExtents(known["orders"].incarnation, {0: Extent(0, 9)})}
    assert store.wait(before, ["orders"], 30)
    assert store.wait({}, ["orders"], 30)


# --- what is gone -----------------------------------------------------------------------------------
def drop_before(server: RunningServer, topic: str, offset: int) -> int:
    """As retention does it; returns where the partition begins now."""
    log = server.engine.topics.find(topic).partitions[0].log
    server.call(log.drop_before, offset)
    return log.start_offset


def test_retention_was_faster(
    opened: Callable[[], Store],
    server: RunningServer,
    client: BrokerClient,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The error names the offsets; or a warning does, and the rest is read."""
    client.create_topic("orders", segment_bytes=4096)
    fill(client, "orders", 1000)
    start = drop_before(server, "orders", 500)
    assert 300 < start <= 500
    store = opened()
    with pytest.raises(DataLoss, match=f"orders/0: offsets 100 to {start - 1} were deleted"):
        read(store, "orders", 100, 1000)
    assert read(store, "orders", 100, 1000, fail=False) == numbers(start, 1000)
    assert f"offsets 100 to {start - 1}" in caplog.text
    assert read(store, "orders", 10, 20, fail=False) == []


def test_what_is_not_there_any_more(opened: Callable[[], Store], client: BrokerClient) -> None:
    """A log that is shorter than it was."""
    fill(client, "orders", 20)
    store = opened()
    with pytest.raises(DataLoss, match="orders/0: offsets 20 to 29 existed once"):
        read(store, "orders", 15, 30)
    assert read(store, "orders", 15, 30, fail=False) == numbers(15, 20)


def test_what_a_repair_gave_up(
    opened: Callable[[], Store], server: RunningServer, client: BrokerClient
) -> None:
    """Stands in the log as lost, and is."""
    fill(client, "orders", 30)
    server.stop()
    [path] = (server.data_dir / "orders" / "0").glob("*.log")
    raw = path.read_bytes()
    lengths = list(batch_places(raw))
    at, size = lengths[1]
    path.write_bytes(raw[:at] + batches.lost(10, 10, 5).raw() + raw[at + size :])
    server.start()
    store = opened()
    with pytest.raises(DataLoss, match="orders/0: offsets 12 to 19 were destroyed"):
        read(store, "orders", 12, 30)
    assert read(store, "orders", 5, 25, fail=False) == numbers(5, 10) + numbers(20, 25)


def batch_places(raw: bytes) -> list[tuple[int, int]]:
    found, at = [], 0
    while (parsed := batches.parse_header(raw, at)) is not None:
        size = HEADER_BYTES + parsed[1]
        found.append((at, size))
        at += size
    return found


def test_damage(opened: Callable[[], Store], server: RunningServer, client: BrokerClient) -> None:
    """Bytes that fail their checksum are an error that says where, or skipped, exactly."""
    fill(client, "orders", 100)
    server.stop()
    [path] = (server.data_dir / "orders" / "0").glob("*.log")
    raw = bytearray(path.read_bytes())
    for number in (3, 4, 7):
        at, size = batch_places(bytes(raw))[number]
        raw[at + size - 20] ^= 1
    path.write_bytes(raw)
    server.start()
    store = opened()
    with pytest.raises(DataLoss, match="orders/0: offsets 35 to 49 are damaged"):
        read(store, "orders", 35, 100)
    wanted = numbers(25, 30) + numbers(50, 70) + numbers(80, 100)
    assert read(store, "orders", 25, 100, fail=False) == wanted
    assert read(store, "orders", 30, 45, fail=False) == []


def test_a_topic_that_was_made_again(server: RunningServer, client: BrokerClient) -> None:
    """A task does not read the new one for the old one."""
    fill(client, "orders", 10)
    store = broker_store(server)
    span = TaskSpan("orders", 0, 0, 10, store.topics(["orders"])["orders"].incarnation)
    client.delete_topic("orders")
    fill(client, "orders", 50)
    with pytest.raises(DataLoss, match=r"orders/0: offsets 0 to 9 are gone: .* created again"):
        list(records(store, span, fail_on_data_loss=True))
    assert list(records(store, span, fail_on_data_loss=False)) == []
    store.close()


def test_a_broker_behind_tls_and_a_token(tmp_path: Path) -> None:
    """As the options say: the certificate travels as text, so an executor needs no file."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    with running_server(tls_cert=str(certificate), tls_key=str(key), token="secret") as server:
        with server.client(tls=True, ca=str(certificate)) as client:
            fill(client, "orders", 10)
        servers = f"{server.host}:{server.port}"
        given = {"topic": "orders", "servers": servers, "ca": str(certificate), "token": "secret"}
        options = SourceOptions.of(given)
        certificate.unlink()
        store = pickle.loads(pickle.dumps(open_store(options)))
        assert read(store, "orders", 0, 10) == numbers(0, 10)
        store.close()


# --- a directory --------------------------------------------------------------------------------------
def everything(path: Path) -> dict[str, tuple[int, int]]:
    """All files, with their sizes and times."""
    return {
        str(each.relative_to(path)): (each.stat().st_size, each.stat().st_mtime_ns)
        for each in sorted(path.rglob("*"))
    }


def test_a_directory_is_only_read(server: RunningServer, client: BrokerClient) -> None:
    """Indexes that are missing, a torn tail, a mark of doubt: nothing is touched."""
    client.create_topic("orders", segment_bytes=4096)
    fill(client, "orders", 1000)
    server.stop()
    home = server.data_dir / "orders" / "0"
    for path in home.glob("*.idx"):
        path.unlink()
    last = sorted(home.glob("*.log"))[-1]
    with last.open("ab") as file:
        file.write(b"half a batch")
    (server.data_dir / "@suspect").write_text("?")
    before = everything(server.data_dir)
    store = DirectoryStore(server.data_dir)
    assert read(store, "orders", 0, 1000) == numbers(0, 1000)
    assert everything(server.data_dir) == before
    with pytest.raises(OSError, match="only read"):
        store._files.open(home / "x", write=True)


def test_a_torn_tail_ends_the_data(server: RunningServer, client: BrokerClient) -> None:
    """What was being written when the power went, and what lies behind it, was promised to nobody."""
    fill(client, "orders", 50)
    server.stop()
    [path] = (server.data_dir / "orders" / "0").glob("*.log")
    raw = path.read_bytes()
    at, size = batch_places(raw)[-1]
    store = DirectoryStore(server.data_dir)
    for torn in (raw[: at + size - 8], raw[: at + 10], raw[:at], raw[:at] + bytes(8192)):
        path.write_bytes(torn)
        assert store.topics(["orders"])["orders"].partitions[0].end == 40
    path.write_bytes(raw + bytes(4096))
    assert store.topics(["orders"])["orders"].partitions[0].end == 50


def test_an_empty_segment_is_no_end(server: RunningServer, client: BrokerClient) -> None:
    """One that was made and never used lies before the end of the log, or at it."""
    fill(client, "orders", 50)
    server.stop()
    home = server.data_dir / "orders" / "0"
    store = DirectoryStore(server.data_dir)
    (home / f"{50:020d}.log").touch()
    assert store.topics(["orders"])["orders"].partitions[0].end == 50
    (home / f"{50:020d}.log").unlink()
    (home / f"{30:020d}.log").touch()
    assert store.topics(["orders"])["orders"].partitions[0].end == 50


def test_a_topic_without_its_settings(server: RunningServer, client: BrokerClient) -> None:
    """The directories are the truth."""
    fill(client, "orders", 50)
    server.stop()
    (server.data_dir / "orders" / "topic.json").unlink()
    store = DirectoryStore(server.data_dir)
    assert read(store, "orders", 0, 50) == numbers(0, 50)


def test_the_directory_of_a_live_broker(server: RunningServer, client: BrokerClient) -> None:
    """It is read beside it, and what is new is seen."""
    fill(client, "orders", 50)
    store = DirectoryStore(server.data_dir)
    known = store.topics(["orders"])
    assert read(store, "orders", 0, 50) == numbers(0, 50)
    fill(client, "orders", 10)
    assert store.wait(known, ["orders"], 10)
    assert store.topics(["orders"])["orders"].partitions[0].end == 60
    fill(client, "orders", 1)  # the broker goes on writing


def test_no_directory(tmp_path: Path) -> None:
    """The error names the option."""
    with pytest.raises(errors.InvalidArgument, match="option path"):
        DirectoryStore(tmp_path / "nothing").topics(["a"])
    options = SourceOptions.of({"topic": "a", "path": str(tmp_path)})
    assert isinstance(open_store(options), DirectoryStore)


def test_a_newer_version_wrote_it(server: RunningServer, client: BrokerClient) -> None:
    """That is neither damage nor an end."""
    fill(client, "orders", 10)
    server.stop()
    [path] = (server.data_dir / "orders" / "0").glob("*.log")
    raw = bytearray(path.read_bytes())
    raw[3:4] = b"2"
    raw[30:32] = (3).to_bytes(2, "little")
    raw[4:8] = batches.crc32c(bytes(raw[8:64])).to_bytes(4, "little")
    path.write_bytes(raw)
    with pytest.raises(errors.DataCorrupt, match="newer version"):
        DirectoryStore(server.data_dir).topics(["orders"])


def test_half_a_commit_is_not_shown(tmp_path: Path) -> None:
    """A broker that was killed in the middle of one: its partitions end before it."""
    with running_server(tmp_path / "data") as server, server.client() as client:
        client.create_topic("orders", partitions=2)
        fill(client, "orders", 20, partition=0)
        fill(client, "orders", 10, partition=1)
        pieces = [
            client.stage("orders", batches.encode(Columns([b"staged"] * 5)), partition=number)
            for number in (0, 1)
        ]
        client.commit_staged("job", 0, pieces)
        more = [
            client.stage("orders", batches.encode(Columns([b"more"] * 3)), partition=number)
            for number in (0, 1)
        ]
        client.commit_staged("job", 1, more)
    store = DirectoryStore(tmp_path / "data")

    def ends() -> list[int]:
        extents = store.topics(["orders"])["orders"].partitions
        return [extents[number].end for number in (0, 1)]

    assert ends() == [28, 18]
    assert unfinished_commits((tmp_path / "data" / "@subscriptions.journal").read_bytes()) == []
    # Now as a crash leaves it: decided, stored in one partition and not in the other.
    take_back(tmp_path / "data", number=1, keep=15)
    assert ends() == [25, 15]


def take_back(directory: Path, *, number: int, keep: int) -> None:
    """Cut partition 1 before the last commit, and the journal before the word that it is finished."""
    [path] = (directory / "orders" / str(number)).glob("*.log")
    raw = path.read_bytes()
    place = next(at for at, _ in batch_places(raw) if header_offset(raw, at) == keep)
    path.write_bytes(raw[:place])
    journal = directory / "@subscriptions.journal"
    raw = journal.read_bytes()
    at = raw.rindex(b'"finished":true')
    start = raw.rindex(b'T{"name"', 0, at) - 8
    journal.write_bytes(raw[:start])


def header_offset(raw: bytes, at: int) -> int:
    parsed = batches.parse_header(raw, at)
    assert parsed is not None
    return parsed[0].base_offset
