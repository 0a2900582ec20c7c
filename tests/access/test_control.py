"""Access control of a broker: logins, changes that reach every caller, and a file that breaks."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.access import control
from headrace.access.control import AccessControl
from headrace.access.directory import AccessDirectory
from headrace.access.file import NAME
from headrace.access.hashing import is_password, token_hash
from headrace.errors import DataCorrupt, QueueFull, Unauthenticated
from tests.fakes.time import FakeClock, FakeLoop

PASSWORD = "correct horse"


@pytest.fixture
def directory(tmp_path: Path) -> AccessDirectory:
    """With an administrator, who has a certificate: a password takes time to make."""
    found = AccessDirectory(tmp_path)
    found.create_user("root", certificates=["root"], grants=["admin:>"])
    return found


@pytest.fixture
def loop() -> FakeLoop:
    return FakeLoop()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def access(
    tmp_path: Path, directory: AccessDirectory, loop: FakeLoop, clock: FakeClock
) -> Iterator[AccessControl]:
    found = AccessControl(tmp_path, loop, clock=clock)
    found.open()
    found.watch()
    yield found
    found.close()


def log_in(access: AccessControl, user: str, password: str) -> control.Caller | None:
    return asyncio.run(access.by_password(user, password))


# --- logins -----------------------------------------------------------------------------------------
def test_without_a_file_and_a_token_everybody_may(tmp_path: Path, loop: FakeLoop) -> None:
    """As before there was any access control."""
    access = AccessControl(tmp_path, loop)
    access.open()
    assert not access.is_on
    assert access.anyone.unlimited
    access.close()


def test_the_token_of_the_settings_is_an_administrator(tmp_path: Path, loop: FakeLoop) -> None:
    """Nobody else is anything."""
    access = AccessControl(tmp_path, loop)
    access.setting = "swordfish"
    access.open()
    assert access.is_on
    assert not access.anyone.valid
    caller = access.by_token("swordfish")
    assert caller is not None
    assert caller.unlimited
    assert access.by_token("swordfis") is None
    assert access.by_token("") is None
    access.close()


def test_a_password(access: AccessControl, directory: AccessDirectory) -> None:
    """Right or wrong, of a user that exists or not."""
    directory.change_user("root", password=PASSWORD)
    access.look()
    caller = log_in(access, "root", PASSWORD)
    assert caller is not None
    assert caller.unlimited
    assert caller.name == "user:root"
    assert log_in(access, "root", "wrong horse") is None
    assert log_in(access, "nobody", PASSWORD) is None
    assert log_in(access, "root", "x" * 10_000) is None


def test_a_right_password_is_hashed_once(
    access: AccessControl, directory: AccessDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may send it with every request; a new password is hashed again."""
    directory.change_user("root", password=PASSWORD)
    access.look()
    hashed: list[str] = []

    def counted(stored: str, password: str) -> bool:
        hashed.append(password)
        return is_password(stored, password)

    monkeypatch.setattr(control, "is_password", counted)
    assert access.by_known_password("root", PASSWORD) is None
    for _ in range(3):
        assert log_in(access, "root", PASSWORD) is not None
    assert access.by_known_password("root", PASSWORD) is not None
    assert access.by_known_password("root", PASSWORD + "x") is None
    assert hashed == [PASSWORD]


def test_passwords_that_wait_are_bounded(
    access: AccessControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood of logins costs neither memory nor threads."""
    monkeypatch.setattr(control, "WAITING_MAX", 3)

    async def flood() -> list[object]:
        logins = [access.by_password("root", f"wrong {number}") for number in range(10)]
        return await asyncio.gather(*logins, return_exceptions=True)

    found = asyncio.run(flood())
    refused = [each for each in found if isinstance(each, QueueFull)]
    assert len(refused) == 7
    assert {each.code for each in refused} == {"too_many_logins"}


def test_a_token_is_found_by_its_hash(access: AccessControl, directory: AccessDirectory) -> None:
    """The file does not know the secret."""
    secret = directory.create_token("ci", grants=["publish:builds.>"])["secret"]
    access.look()
    caller = access.by_token(secret)
    assert caller is not None
    assert caller.name == "token:ci"
    assert caller.may("publish", "builds.main")
    assert not caller.may("publish", "orders")
    assert secret not in Path(str(access.store.path)).read_text()
    assert token_hash(secret) in Path(str(access.store.path)).read_text()


def test_a_token_of_a_user_is_the_user(access: AccessControl, directory: AccessDirectory) -> None:
    """With its rights of now, and no longer than it."""
    directory.create_user("alice", grants=["publish:a"])
    secret = directory.create_token("laptop", user="alice")["secret"]
    access.look()
    caller = access.by_token(secret)
    assert caller is not None
    assert caller.name == "user:alice"
    assert caller.may("publish", "a")
    directory.change_user("alice", grants=["publish:b"])
    access.look()
    assert caller.may("publish", "b")
    assert not caller.may("publish", "a")
    directory.delete_user("alice")
    access.look()
    assert not caller.valid
    assert access.by_token(secret) is None


def test_a_certificate(access: AccessControl, directory: AccessDirectory) -> None:
    """The first name that is known."""
    directory.create_user("svc", certificates=["svc.example.org"], grants=["publish:a"])
    access.look()
    caller = access.by_certificate(["other", "svc.example.org"])
    assert caller is not None
    assert caller.name == "user:svc"
    assert access.by_certificate(["other"]) is None
    assert access.by_certificate([]) is None
    directory.change_user("svc", certificates=["new.example.org"])
    access.look()
    assert not caller.valid


# --- changes ----------------------------------------------------------------------------------------
Change = Callable[[AccessDirectory], object]


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.delete_user("alice"),
        lambda d: d.change_user("alice", password="another horse"),
        lambda d: d.change_user("alice", disabled=True),
    ],
    ids=["deleted", "password", "disabled"],
)
def test_a_login_ends(access: AccessControl, directory: AccessDirectory, change: Change) -> None:
    """Whoever holds the caller sees it at once, and hears why."""
    directory.create_user("alice", password=PASSWORD, grants=["publish:orders"])
    access.look()
    caller = log_in(access, "alice", PASSWORD)
    assert caller is not None
    caller.publishes.add("orders")
    change(directory)
    access.look()
    assert not caller.valid
    assert not caller.publishes
    with pytest.raises(Unauthenticated) as caught:
        caller.need("publish", "orders")
    assert caught.value.code == "login_ended"
    assert log_in(access, "alice", PASSWORD) is None


def test_changed_rights_are_in_force_where_they_were_decided_before(
    access: AccessControl, directory: AccessDirectory
) -> None:
    """No decision is remembered across a change."""
    directory.create_user("alice", password=PASSWORD, grants=["publish,consume:orders"])
    access.look()
    caller = log_in(access, "alice", PASSWORD)
    assert caller is not None
    assert caller.may("consume", "orders")
    caller.publishes.add("orders")
    directory.change_user("alice", grants=["consume:users"])
    access.look()
    assert caller.valid
    assert not caller.may("consume", "orders")
    assert caller.may("consume", "users")
    assert not caller.publishes


def test_a_change_is_seen_within_a_second(
    access: AccessControl, directory: AccessDirectory, loop: FakeLoop
) -> None:
    """Without anybody asking for it; those who hold on to something are told."""
    told: list[int] = []
    access.listeners.append(lambda: told.append(1))
    directory.create_user("alice", grants=["publish:a"])
    loop.advance(1.0)
    assert access.rules is not None
    assert access.rules.user("alice") is not None
    assert told == [1]
    loop.advance(10.0)
    assert told == [1]


def test_a_token_expires(
    access: AccessControl, directory: AccessDirectory, loop: FakeLoop, clock: FakeClock
) -> None:
    """By the wall clock, within a second, for those who are logged in, too."""
    ends = directory._clock.now_ms() + 60_000
    secret = directory.create_token("ci", grants=["publish:a"], expires=ends)["secret"]
    clock.set(ends - 10_000)
    access.look()
    caller = access.by_token(secret)
    assert caller is not None
    clock.set(ends + 1)
    assert access.by_token(secret) is None
    loop.advance(1.0)
    assert not caller.valid


def test_control_that_is_turned_on_ends_everybody(tmp_path: Path, loop: FakeLoop) -> None:
    """Whoever came while everybody was allowed to is nobody any more."""
    access = AccessControl(tmp_path, loop)
    access.open()
    access.watch()
    before = access.anyone
    AccessDirectory(tmp_path).create_user("root", certificates=["root"], grants=["admin:>"])
    loop.advance(1.0)
    assert access.is_on
    assert not before.valid
    assert not before.may("publish", "orders")
    assert not access.anyone.valid
    access.close()


# --- a file that breaks -----------------------------------------------------------------------------
def test_a_broken_file_is_no_start(tmp_path: Path, loop: FakeLoop) -> None:
    """Least of all one for everybody."""
    (tmp_path / NAME).write_text("{}")
    access = AccessControl(tmp_path, loop)
    with pytest.raises(DataCorrupt, match="cannot be used"):
        access.open()
    access.close()


@pytest.mark.parametrize("how", ["broken", "empty", "gone"])
def test_a_file_that_breaks_changes_nothing(
    access: AccessControl,
    directory: AccessDirectory,
    loop: FakeLoop,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    """The last good rules stay, and it is said once; a good file is taken again."""
    secret = directory.create_token("ci", grants=["publish:a"])["secret"]
    loop.advance(1.0)
    caller = access.by_token(secret)
    path = tmp_path / NAME
    good = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(b"" if how == "empty" else good[:-20])
    with caplog.at_level(logging.ERROR, "headrace.access"):
        loop.advance(5.0)
    assert [record.levelno for record in caplog.records].count(logging.ERROR) == 1
    assert access.problem is not None
    assert access.is_on
    assert caller is not None
    assert caller.valid
    assert caller.may("publish", "a")
    assert access.by_token(secret) is caller
    path.write_bytes(good)
    loop.advance(1.0)
    assert access.problem is None
    assert caller.valid
