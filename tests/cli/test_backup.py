"""``headrace backup``, ``restore`` and ``verify``, as an operator runs them; and killed for real."""

import os
import subprocess
import time
from pathlib import Path

from headrace.backup.manifest import BackupDirectory
from headrace.backup.verifying import verify
from headrace.client.threads import BrokerClient
from headrace.testing import RunningServer, running_server, server_process
from headrace.testing.servers import wait_until
from tests.backup.rig import backed_up, restored_to
from tests.backup.test_copying import flip
from tests.cli.rig import Command, start_script


def test_a_backup_is_taken_listed_verified_and_restored(
    tmp_path: Path, server: RunningServer, client: BrokerClient, headrace: Command
) -> None:
    """The whole walk, with what each command says."""
    client.publish_many("backups", [b"x"] * 100)
    backup = str(tmp_path / "b")
    ran = headrace("backup", backup)
    assert ran.code == 0
    assert ran.out.startswith(f"Generation 1 in {backup}: 1")
    assert headrace("backup", backup, "--rate", "50MB", "--json").json["copied_bytes"] == 0
    listed = headrace("backup", backup, "--list")
    assert [row[0] for row in listed.rows] == ["generation", "1", "2"]
    assert headrace("verify", backup).out.startswith("Healthy")
    ran = headrace("restore", backup, str(tmp_path / "data"))
    assert (ran.code, ran.out.split()[0]) == (0, "Restored")
    with running_server(data_dir=tmp_path / "data") as copy, copy.client() as other:
        assert other.topic_stats("backups")["messages"] == 100


def test_exit_codes_tell_damage_from_mistakes(
    tmp_path: Path, server: RunningServer, client: BrokerClient, headrace: Command
) -> None:
    """1: damage was found; 2: it could not run."""
    client.publish_many("backups2", [b"x" * 100] * 100)
    backup = str(tmp_path / "b")
    headrace("backup", backup)
    flip(next((tmp_path / "b").glob("topics/backups2@*/0/*.log")), 200)
    verified = headrace("verify", backup)
    assert verified.code == 1
    assert verified.out.startswith("backups2/0: offsets 0 to 99 are damaged (topics/backups2@")
    assert headrace("verify", backup, "--json").json["flaws"][0]["end"] == 100
    refused = headrace("restore", backup, str(tmp_path / "data"))
    assert refused.code == 2
    assert refused.err.endswith("[backup_damaged]\n")
    salvaged = headrace("restore", backup, str(tmp_path / "data2"), "--salvage")
    assert salvaged.code == 1
    assert "100 messages lost" in salvaged.out
    for arguments, why in (
        (("verify", str(tmp_path / "nothing")), "does not exist"),
        (("verify", str(tmp_path / "data2")), "is not a backup"),
        (("restore", backup, str(tmp_path / "data2")), "is not empty"),
        (("backup", backup, "--data", str(server.data_dir)), "in use by process"),
        (("backup", backup, "--rate", "fast"), "--rate takes a size"),
        (("backup", str(tmp_path / "data2")), "not a backup"),
    ):
        ran = headrace(*arguments)
        assert ran.code == 2, arguments
        assert why in ran.err


def test_a_directory_is_backed_up_without_a_broker(tmp_path: Path, command: Command) -> None:
    """``--data`` connects to nobody, and refuses a directory in use."""
    backup, data = str(tmp_path / "b"), str(tmp_path / "data")
    with running_server(data) as server:
        with server.client() as client:
            client.publish("orders", b"x")
        ran = command("backup", backup, "--data", data)
        assert (ran.code, "in use by process" in ran.err) == (2, True)
        server.stop()
        assert command("backup", backup, "--data", data).code == 0


def test_over_tls_with_a_login(tmp_path: Path, command: Command) -> None:
    """From another machine: encrypted, and only for an administrator."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    token = "correct-horse-battery-staple"
    with running_server(tls_cert=str(certificate), tls_key=str(key), token=token) as server:
        to = ("--server", f"127.0.0.1:{server.port}", "--ca", str(certificate))
        with server.client(ca=str(certificate)) as client:
            client.publish("orders", b"x")
            limited = client.create_token("limited", grants=["admin:orders"])["secret"]
        ran = command("backup", tmp_path / "b", *to, "--token", token, "--json")
        assert (ran.code, ran.json["access"]) == (0, True)
        refused = command("backup", tmp_path / "b", *to, "--token", limited)
        assert (refused.code, "[forbidden]" in refused.err) == (2, True)
        exported = command("export", "orders", *to, "--token", limited)
        assert exported.json_lines[0]["data"] == "x"


def start_backup(path: Path, port: int) -> "subprocess.Popen[str]":
    """A slow one, in a process of its own; returns when it has written something."""
    began = time.time_ns()
    process = start_script(
        "backup", str(path), "--rate", "2MB", HEADRACE_SERVER=f"127.0.0.1:{port}"
    )

    def writes() -> bool:
        assert process.poll() is None
        return any(each.stat().st_mtime_ns > began for each in path.glob("topics/*/*/*.log"))

    wait_until(writes, 30)
    return process


def test_a_kill_of_either_side_leaves_the_earlier_generations(tmp_path: Path) -> None:
    """kill -9 of the backup, then of the broker: what was there is whole, and the next one is complete."""
    backup = BackupDirectory(tmp_path / "b")
    with server_process(tmp_path / "data", durability="always") as server:
        with server.client() as client:
            client.publish_many("orders", [b"first"] * 10)
            backed_up(backup.path, server)
            for _ in range(40):
                client.publish_many("orders", [os.urandom(1000)] * 100)
        process = start_backup(backup.path, server.port)
        process.kill()
        process.communicate()
        assert backup.numbers() == [1]
        assert verify(backup).is_good

        # The lease of the killed one ends after a minute; a broker that starts again knows of none.
        server.kill()
        server.start()
        process = start_backup(backup.path, server.port)
        try:
            server.kill()
            server.start()
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 0, err
        assert "Generation 2" in out
        assert "the broker was lost meanwhile" in err
    assert verify(backup).is_good
    restored_to(backup.path, tmp_path / "new")
    with running_server(data_dir=tmp_path / "new") as copy, copy.client() as client:
        assert client.topic_stats("orders")["messages"] == 4010
