"""``headrace serve`` and ``headrace config``: starting, stopping, and what was told by whom."""

import json
import os
import signal
from pathlib import Path

import pytest

from headrace.cli import EXIT_UNAVAILABLE
from headrace.settings import SETTINGS
from headrace.testing import DidNotStart, running_server, server_process
from tests.cli.rig import Command


# --- serve ------------------------------------------------------------------------------------------
def test_the_line_that_says_ready(tmp_path: Path) -> None:
    """It names the address and the directory, and it comes when clients can connect."""
    with server_process(tmp_path / "data") as server:
        assert server.ready_line.startswith("Headrace is ready: tcp://127.0.0.1:")
        assert server.ready_line.endswith(f"(data: {tmp_path / 'data'})")
        with server.client() as client:
            client.publish_text("events", "one")
        assert server.terminate() == 0
        assert (tmp_path / "data" / "events" / "0").is_dir()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_good_order(number: signal.Signals) -> None:
    """Exit code 0, one line that says so after those about open files and the disk, no traceback."""
    with server_process() as server:
        server.signal(number)
        assert server.wait() == 0
        *before, line = server.errors.splitlines()
        assert all("files" in each or "io_uring" in each for each in before)
        assert line.endswith("headrace.server: stopping")


def test_in_memory_nothing_is_written(tmp_path: Path) -> None:
    """--memory creates no directory."""
    with server_process(tmp_path / "data", arguments=("--memory",)) as server:
        assert server.ready_line.endswith("(data: in memory)")
        with server.client() as client:
            client.publish_text("events", "one")
            assert client.topic_stats("events")["durability"] == "memory"
        server.terminate()
    assert not (tmp_path / "data").exists()


def test_flags_are_stronger_than_the_environment(tmp_path: Path) -> None:
    """The flag wins."""
    directory = tmp_path / "flag"
    arguments = ("--data-dir", str(directory), "--durability", "never", "--max-message-size", "1KB")
    with server_process(tmp_path / "environment", arguments=arguments) as server:
        with server.client() as client:
            client.publish_text("events", "one")
            assert client.topic_stats("events")["durability"] == "never"
            assert client.info()["max_message_size"] == 1024
        server.terminate()
    assert (directory / "events").is_dir()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--port", "99999"), "invalid_setting"),
        (("--host", "0.0.0.0"), "authentication_required"),
        (("--durability", "sometimes"), "invalid_setting"),
        (("--max-message-size", "1GB"), "invalid_setting"),
        (("--max-message-size", "huge"), "invalid_setting"),
        (("--log-level", "loud"), "invalid_setting"),
        (("--tls-cert", "cert.pem"), "invalid_setting"),
        (("--tls-cert", "no.pem", "--tls-key", "no.pem"), "invalid_setting"),
        (("--config", "nothing.json"), "no_config"),
        (("--data-dir", "/proc/nothing"), "directory_unusable"),
    ],
    ids=" ".join,
)
def test_it_does_not_start(command: Command, arguments: tuple[str, ...], code: str) -> None:
    """Exit code 2 and one sentence, before anything is touched."""
    ran = command("serve", "--port", "0", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert len(ran.err.splitlines()) == 1
    assert ran.err.endswith(f"[{code}]\n")


def test_the_port_is_taken(command: Command, tmp_path: Path) -> None:
    """The sentence says what to do, and the directory is free again."""
    with running_server() as server:
        ran = command("serve", "--port", server.port, "--data-dir", tmp_path)
        assert ran.code == EXIT_UNAVAILABLE
        assert "[cannot_listen]" in ran.err
        assert "is another broker running?" in ran.err
    with running_server(tmp_path):
        pass


@pytest.mark.parametrize(
    ("host", "advice"),
    [("192.0.2.1", "this machine does not have that address"), ("no-such-host.invalid", "")],
)
def test_an_address_that_is_not_available(command: Command, host: str, advice: str) -> None:
    """It has an exit code of its own, because a service manager should try again."""
    ran = command("serve", "--host", host, "--port", "0", "--memory", "--token", "x" * 16)
    assert (ran.code, ran.out) == (EXIT_UNAVAILABLE, "")
    assert host in ran.err
    assert advice in ran.err
    assert ran.err.endswith("[cannot_listen]\n")


def test_the_directory_is_taken(command: Command) -> None:
    """The one who comes second says who holds it."""
    with running_server() as server:
        ran = command("serve", "--port", "0", "--data-dir", server.data_dir)
        assert ran.code == 2
        assert f"is in use by process {os.getpid()} on " in ran.err
        assert "[directory_locked]" in ran.err


def test_as_a_process_it_does_not_start_either(tmp_path: Path) -> None:
    """The exit code is what a service manager sees."""
    with (
        pytest.raises(DidNotStart) as caught,
        server_process(tmp_path, arguments=("--port", "x")),
    ):
        pass
    assert caught.value.code == 2
    assert "Traceback" not in caught.value.errors


# --- config -----------------------------------------------------------------------------------------
def test_all_settings_are_listed(command: Command) -> None:
    """Each with its value, where that came from, and what it means."""
    ran = command("config")
    assert ran.code == 0
    assert [row[0] for row in ran.rows[1:]] == [setting.name for setting in SETTINGS]
    assert ran.rows[2][:3] == ["port", "9999", "default"]


def test_where_each_value_came_from(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is weaker than the environment; Headrace's own names are stronger than others."""
    Path("config.json").write_text(
        '{"server": {"host": "localhost", "port": 1}, "storage": {"path": "elsewhere"}}'
    )
    monkeypatch.setenv("QB_SERVER_PORT", "2")
    monkeypatch.setenv("HEADRACE_PORT", "3")
    monkeypatch.setenv("RETENTION_HOURS", "48")
    settings = command("config", "--json").json
    assert settings["host"] == {"value": "localhost", "source": "config.json"}
    assert settings["data_dir"] == {"value": "elsewhere", "source": "config.json"}
    assert settings["port"] == {"value": 3, "source": "environment HEADRACE_PORT"}
    assert settings["retention_hours"] == {"value": 48.0, "source": "environment RETENTION_HOURS"}
    assert settings["durability"] == {"value": "always", "source": "default"}


def test_the_token_is_not_shown(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only that there is one."""
    monkeypatch.setenv("HEADRACE_TOKEN", "swordfish")
    ran = command("config")
    assert "(set)" in ran.out
    assert "swordfish" not in ran.out
    assert command("config", "--json").json["token"]["value"] == "(set)"


def test_a_file_may_be_named(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the option, or by HEADRACE_CONFIG."""
    Path("other.json").write_text(json.dumps({"server": {"port": 4}}))
    assert command("config", "--config", "other.json", "--json").json["port"]["value"] == 4
    monkeypatch.setenv("HEADRACE_CONFIG", "other.json")
    assert command("config", "--json").json["port"]["source"] == "other.json"


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("{", "invalid_config"),
        ("[]", "invalid_config"),
        ('{"server": {"prot": 1}}', "unknown_setting"),
        ('{"colour": "blue"}', "unknown_setting"),
        ('{"server": {"port": "x"}}', "invalid_setting"),
    ],
)
def test_a_file_with_a_mistake(command: Command, content: str, code: str) -> None:
    """It is named, and not passed over."""
    Path("config.json").write_text(content)
    for arguments in (["config"], ["serve", "--port", "0"]):
        ran = command(*arguments)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.endswith(f"[{code}]\n")


def test_an_unknown_variable(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt setting in the environment is an error too."""
    monkeypatch.setenv("HEADRACE_DATADIR", "/tmp")
    ran = command("config")
    assert ran.code == 2
    assert "HEADRACE_DATADIR" in ran.err
    assert "[unknown_setting]" in ran.err
