"""``headrace users``, ``headrace tokens``, ``headrace access``: with a broker, and on a directory."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from argon2 import PasswordHasher

from headrace.access import hashing
from headrace.testing import RunningServer, running_server
from tests.cli.rig import Command

PASSWORD = "correct horse"


@pytest.fixture(autouse=True)
def _quick_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        hashing, "_hasher", PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
    )


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(token="root-token") as server:
        yield server


@pytest.fixture
def data(tmp_path: Path) -> str:
    return str(tmp_path / "data")


# --- on a directory ---------------------------------------------------------------------------------
def test_the_first_administrator(command: Command, data: str) -> None:
    """Before any broker runs; then a broker lets nobody in but this user."""
    ran = command("users", "add", "root", "--admin", "--data", data, input=PASSWORD + "\n")
    assert (ran.code, ran.lines) == (0, ["Added user root (admin:>)."])
    rows = command("users", "list", "--data", data).rows
    assert rows[1][:3] == ["root", "admin:>", "yes"]
    with running_server(data) as server:
        address = f"{server.host}:{server.port}"
        ran = command("topics", "--server", address)
        assert ran.code == 2
        assert "wants a login" in ran.err
        # a user that is added beside the running broker
        added = command("users", "add", "bob", "--no-password", "--grant", "browse:orders.>",
                        "--certificate", "bob", "--data", data)  # fmt: skip
        assert added.code == 0
        secret = command("tokens", "create", "t", "--for", "bob", "--data", data).lines[-1]
        server.call(server.engine.access.look)
        ran = command("access", "whoami", "--server", address, "--token", secret)
        assert ran.lines == ["user:bob", "may browse:orders.>"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("users", "add", "alice", "--grant", "publish:a"), "no_administrator"),
        (("users", "add", "a b", "--admin"), "invalid_principal"),
        (("users", "add", "alice", "--admin", "--quota", "wings=2"), "invalid_quota"),
        (("users", "add", "alice", "--admin", "--quota", "connections=many"), "invalid_argument"),
        (("users", "change", "alice", "--admin"), "user_not_found"),
        (("users", "delete", "alice", "--yes"), "user_not_found"),
        (("tokens", "revoke", "ci", "--yes"), "token_not_found"),
        (("tokens", "create", "ci", "--admin", "--expires", "soon"), "invalid_expiry"),
        (("tokens", "create", "ci", "--grant", "fly:a"), "invalid_grant"),
        (("tokens", "create", "ci"), "invalid_argument"),
        (("users", "change", "alice"), "invalid_argument"),
    ],
)
def test_a_mistake_is_one_line(
    command: Command, data: str, arguments: tuple[str, ...], code: str
) -> None:
    """With its code, and nothing is changed."""
    ran = command(*arguments, "--data", data, input=PASSWORD + "\n")
    assert ran.code == 2
    assert ran.err.endswith(f"[{code}]\n")
    assert len(ran.err.splitlines()) == 1
    assert not (Path(data) / "@access.json").exists()


def test_a_short_password_is_refused(command: Command, data: str) -> None:
    """And not printed."""
    ran = command("users", "add", "root", "--admin", "--data", data, input="hunter\n")
    assert ran.code == 2
    assert "hunter" not in ran.err + ran.out


# --- with a broker ----------------------------------------------------------------------------------
def test_users_and_tokens_of_a_broker(
    command: Command, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole life of both."""
    monkeypatch.setenv("HEADRACE_SERVER", f"{server.host}:{server.port}")
    monkeypatch.setenv("HEADRACE_TOKEN", "root-token")
    assert command("access", "whoami").lines == ["token", "may do everything"]
    grant = ("--grant", "publish,consume:orders.>", "--grant", "browse:users")
    ran = command("users", "add", "alice", *grant, "--quota", "connections=5", input=PASSWORD)
    assert ran.lines == ["Added user alice (publish,consume:orders.>; browse:users)."]
    ran = command("tokens", "create", "ci", "--grant", "publish:a", "--expires", "90d", "--json")
    secret, expires = ran.json["secret"], ran.json["expires"]
    assert expires > ran.json["created"] + 80 * 86_400_000
    assert command("tokens", "list").rows[1][:2] == ["ci", "publish:a"]
    assert secret not in command("tokens", "list", "--json").out
    monkeypatch.delenv("HEADRACE_TOKEN")
    monkeypatch.setenv("HEADRACE_USER", "alice")
    assert command("access", "whoami").code == 2  # no password
    monkeypatch.setenv("HEADRACE_PASSWORD", PASSWORD)
    assert command("access", "whoami").lines == [
        "user:alice",
        "may publish,consume:orders.>",
        "may browse:users",
        "quota connections=5",
    ]
    assert command("publish", "orders.new", "x").code == 0
    ran = command("publish", "users", "x")
    assert (ran.code, ran.err.endswith("[forbidden]\n")) == (2, True)
    assert command("users", "list").err.endswith("[forbidden]\n")
    root = ("--token", "root-token")
    ran = command("bench", "--topic", "orders.new", "-c", "1", "-n", "5")
    assert ran.code == 0, ran.err
    assert command("bench", "--topic", "users", "-c", "1", "-n", "5").code != 0
    assert command("users", "change", "alice", "--no-grants", *root).code == 0
    assert command("publish", "orders.new", "x").err.endswith("[forbidden]\n")
    assert command("users", "delete", "alice", "--yes", *root).lines == ["Deleted user alice."]
    assert command("access", "whoami").err.endswith("[unauthenticated]\n")
    assert command("tokens", "revoke", "ci", "--yes", *root).lines == ["Revoked token ci."]
    ran = command("access", "quotas", "--address", "connections=1000", *root)
    assert ran.rows[1] == ["addresses", "connections", "1000"]
