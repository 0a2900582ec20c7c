"""The disk, where a system lacks what Linux has."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import Broker, files, limits
from headrace.files import Files, SharedFiles

LESS = """
import os, resource, socket, sys
for name in ("fdatasync", "posix_fallocate", "sched_getaffinity"):
    delattr(os, name)
for name in ("TCP_KEEPIDLE", "TCP_USER_TIMEOUT"):
    delattr(socket, name)
def refused(what, values):
    raise ValueError("current limit exceeds maximum limit")
resource.setrlimit = refused
from headrace import Broker, limits
from headrace.testing import running_server
"""


def run(script: str, *arguments: object) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LESS + script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr


def test_a_broker_runs_without_what_only_linux_has(tmp_path: Path) -> None:
    """As on macOS: everything is synced, space is not reserved, and what is read back is the same."""
    run(
        """
assert limits.cores() >= 1
with Broker(sys.argv[1], segment_bytes=64 << 10) as broker:
    for number in range(50):
        broker.publish_many("orders", [b"%d-%d" % (number, n) + bytes(2000) for n in range(10)])
""",
        tmp_path,
    )
    with Broker(tmp_path) as broker:
        found = [value.rstrip(b"\0") for value in broker.fetch_values("orders", max_bytes=8 << 20)]
    assert found == [b"%d-%d" % (number, n) for number in range(50) for n in range(10)]


def test_a_server_runs_without_what_only_linux_has() -> None:
    run(
        """
with running_server() as server, server.client() as client:
    assert client.publish("orders", b"x").offset == 0
    assert client.fetch_values("orders") == [b"x"]
"""
    )


def test_without_fdatasync_the_whole_file_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On macOS by the call that does not stop at the drive's own memory."""
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(files, "_sync", files._sync_all)
    monkeypatch.setattr(os, "fsync", lambda fd: asked.append(("fsync", fd)))
    monkeypatch.setattr(files.fcntl, "fcntl", lambda fd, what: asked.append((f"fcntl {what}", fd)))
    handle = Files().open(tmp_path / "file", write=True, create=True)
    Files().sync(handle)
    monkeypatch.setattr(files, "_FULL_SYNC", 51)
    Files().sync(handle)
    assert asked == [("fsync", handle.fd), ("fcntl 51", handle.fd)]


def test_cores_are_those_that_may_be_used() -> None:
    assert limits.cores() == len(os.sched_getaffinity(0))


def modes(path: Path) -> dict[str, str]:
    return {
        str(each.relative_to(path.parent)): oct(each.lstat().st_mode & 0o777)
        for each in (path, *path.rglob("*"))
    }


def test_a_data_directory_is_for_its_owner_alone(tmp_path: Path) -> None:
    """Whatever the umask says: messages, settings and the lock."""
    before = os.umask(0)
    try:
        with Broker(tmp_path / "deep" / "data") as broker:
            broker.publish("orders", b"secret")
            found = modes(tmp_path / "deep")
    finally:
        os.umask(before)
    assert len(found) > 5
    assert "deep/data/@lock" in found
    assert set(found.values()) == {"0o700", "0o600"}


def test_a_directory_that_others_can_read_is_tightened_at_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a line in the log; what is private already is not looked at."""
    with Broker(tmp_path / "data") as broker:
        broker.publish("orders", b"secret")
    for folder, directories, names in os.walk(tmp_path / "data"):
        for name in directories:
            Path(folder, name).chmod(0o755)
        for name in names:
            Path(folder, name).chmod(0o644)
    (tmp_path / "elsewhere").write_text("of somebody else")
    (tmp_path / "elsewhere").chmod(0o644)
    (tmp_path / "data" / "link").symlink_to(tmp_path / "elsewhere")
    assert Files().make_private(tmp_path / "data") == 0
    (tmp_path / "data").chmod(0o755)
    caplog.clear()
    with Broker(tmp_path / "data") as broker:
        assert broker.fetch("orders")[0].value == b"secret"
    (tmp_path / "data" / "link").unlink()
    assert set(modes(tmp_path / "data").values()) == {"0o700", "0o600"}
    assert (tmp_path / "elsewhere").stat().st_mode & 0o777 == 0o644
    assert caplog.text.count("other users could read the data directory") == 1


def test_files_that_others_read_follow_the_umask(tmp_path: Path) -> None:
    """Tables are for other programs, too."""
    before = os.umask(0o022)
    try:
        files = SharedFiles()
        files.make_directory(tmp_path / "table")
        files.replace(tmp_path / "table" / "data", [b"x"])
    finally:
        os.umask(before)
    assert modes(tmp_path / "table") == {"table": "0o755", "table/data": "0o644"}
