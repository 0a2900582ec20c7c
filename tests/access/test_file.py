"""The access file: private, whole, and trusted only when every byte is as it was written."""

import contextlib
import os
import stat
import threading
from pathlib import Path

import pytest

from headrace.access.file import NAME, AccessFile
from headrace.access.rights import parse_grant
from headrace.access.rules import AccessRules, AccessToken, Quotas, User
from headrace.errors import DataCorrupt, InvalidArgument

ALICE = User(
    name="alice",
    created=1,
    password="$argon2id$x",
    grants=(parse_grant("publish:orders.>"), parse_grant("admin:>")),
    quotas=Quotas(connections=3, bytes_per_second=1e6),
)
CI = AccessToken(
    name="ci", created=2, sha256="0" * 64, expires=3, grants=(parse_grant("browse:a:b"),)
)


@pytest.fixture
def file(tmp_path: Path) -> AccessFile:
    return AccessFile(tmp_path)


def write(file: AccessFile) -> Path:
    file.change(lambda rules: rules.with_user(ALICE).with_token(CI))
    assert file.path is not None
    return file.path


def test_what_is_written_is_read(file: AccessFile, tmp_path: Path) -> None:
    """By another process, too; the version grows."""
    assert file.read() is None
    assert file.stamp() is None
    write(file)
    found = AccessFile(tmp_path).read()
    assert found is not None
    assert found.users == (ALICE,)
    assert found.tokens == (CI,)
    assert found.version == 2


def test_only_its_owner_may_read_it(file: AccessFile) -> None:
    """0600, also after a change; nothing else is left behind."""
    path = write(file)
    file.change(lambda rules: rules.but())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(os.listdir(path.parent)) == [NAME, "@access.lock"]


def test_every_flipped_byte_is_noticed(file: AccessFile) -> None:
    """A damaged file is never other rules."""
    path = write(file)
    whole = path.read_bytes()
    good = file.read()
    for place in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x04]) + whole[place + 1 :])
        found = None
        with contextlib.suppress(DataCorrupt):
            found = file.read()
        assert found in (None, good)  # good: white space outside of the rules


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"format":1}', b"null"])
def test_another_file_is_refused(file: AccessFile, content: bytes) -> None:
    """An empty one most of all."""
    write(file).write_bytes(content)
    with pytest.raises(DataCorrupt):
        file.read()


def test_an_unreadable_file_is_refused(file: AccessFile) -> None:
    """It is there, and it cannot be read: a directory will do, for root as well."""
    path = write(file)
    path.unlink()
    path.mkdir()
    with pytest.raises(DataCorrupt):
        file.read()


def test_changes_of_many_do_not_undo_each_other(tmp_path: Path) -> None:
    """The lock is held from reading to writing."""

    def add(number: int) -> None:
        user = User(name=f"u{number}", created=number)
        AccessFile(tmp_path).change(lambda rules: rules.with_user(user))

    threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = AccessFile(tmp_path).read()
    assert found is not None
    assert sorted(user.name for user in found.users) == [f"u{number}" for number in range(8)]


def test_a_refused_change_changes_nothing(file: AccessFile) -> None:
    """The old rules stay as they are."""
    path = write(file)
    before = path.read_bytes()

    def refuse(rules: AccessRules) -> AccessRules:
        raise InvalidArgument("no")

    with pytest.raises(InvalidArgument):
        file.change(refuse)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "rules",
    [
        AccessRules(users=(ALICE, ALICE)),
        AccessRules(tokens=(AccessToken(name="t", created=1, sha256="0" * 64, user="nobody"),)),
        AccessRules(users=(User(name="a b", created=1),)),
        AccessRules(
            users=(
                User(name="a", created=1, certificates=("x",)),
                User(name="b", created=1, certificates=("x",)),
            )
        ),
    ],
)
def test_rules_that_make_no_sense_are_refused(rules: AccessRules) -> None:
    """Wherever they come from."""
    with pytest.raises(InvalidArgument):
        rules.check()
