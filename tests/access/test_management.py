"""Who may change which rules: administrators of the broker, of a namespace, and nobody else."""

from typing import Any

import pytest

from headrace.access import management
from headrace.access.management import Authority
from headrace.access.rights import parse_grant
from headrace.access.rules import AccessRules, Quotas
from headrace.errors import Conflict, Forbidden, HeadraceError, InvalidArgument, NotFound

ROOT = Authority("user:root", True, (), Quotas(), True)
LEAD = Authority(
    "user:team.lead",
    False,
    (parse_grant("admin:team.>:team.>"),),
    Quotas(connections=10),
    True,
)
MEMBER = Authority("user:team.x", False, (parse_grant("manage,publish:team.>"),), Quotas(), True)


@pytest.fixture
def rules() -> AccessRules:
    """An administrator of everything, one of a team, and a user of it."""
    made = management.create_user(
        AccessRules(), ROOT, "root", now_ms=1, password="x", grants=["admin:>"]
    )
    made = management.create_user(
        made, ROOT, "team.lead", now_ms=1, password="x", grants=["admin:team.>:team.>"]
    )
    made = management.create_user(
        made, ROOT, "team.boss", now_ms=1, password="x", grants=["admin:>"]
    )
    return management.create_user(made, ROOT, "other", now_ms=1, grants=["publish:other"])


def add(rules: AccessRules, by: Authority, name: str, **more: Any) -> AccessRules:
    return management.create_user(rules, by, name, now_ms=2, **more)


# --- namespaces -------------------------------------------------------------------------------------
def test_a_namespace_has_its_own_administrators(rules: AccessRules) -> None:
    """Users and tokens in it, with rights in it; a grant over all names is one over its names."""
    made = add(rules, LEAD, "team.bob", grants=["publish,consume:team.orders"])
    bob = made.user("team.bob")
    assert bob is not None
    assert bob.grants == (parse_grant("publish,consume:team.orders:team.>"),)
    assert bob.quotas.connections == 10
    made = management.change_user(made, LEAD, "team.bob", disabled=True)
    made = management.create_token(
        made, LEAD, "team.ci", now_ms=2, sha256="0" * 64, user="team.bob"
    )
    made = management.revoke_token(made, LEAD, "team.ci")
    made = management.delete_user(made, LEAD, "team.bob")
    assert made.user("team.bob") is None


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("bob", {}),
        ("teammate", {}),
        ("team", {}),
        ("team.bob", {"grants": ["publish:orders"]}),
        ("team.bob", {"grants": ["publish:>"]}),
        ("team.bob", {"grants": ["admin:>"]}),
        ("team.bob", {"grants": ["metrics:>"]}),
        ("team.bob", {"grants": ["browse:__audit"]}),
        ("team.bob", {"grants": ["publish:team.a:other"]}),
        ("team.bob", {"quotas": {"connections": 11}}),
        ("team.bob", {"certificates": ["x"]}),
    ],
)
def test_it_never_gives_more_than_it_has(
    rules: AccessRules, name: str, more: dict[str, Any]
) -> None:
    """Neither names, nor topics, nor rights, nor quotas."""
    with pytest.raises(Forbidden):
        add(rules, LEAD, name, **more)


@pytest.mark.parametrize("name", ["root", "other", "team.boss", "nobody"])
def test_it_does_not_touch_others(rules: AccessRules, name: str) -> None:
    """Not even one whose name is in the namespace, if it has more."""
    for change in (
        lambda: management.change_user(rules, LEAD, name, password="y"),
        lambda: management.delete_user(rules, LEAD, name),
        lambda: management.create_token(
            rules, LEAD, "team.t", now_ms=2, sha256="0" * 64, user=name
        ),
    ):
        with pytest.raises(Forbidden):
            change()


def test_it_sees_its_own_alone(rules: AccessRules) -> None:
    """Lists do not tell who else there is."""
    assert [user["user"] for user in management.users(rules, LEAD)] == ["team.lead"]
    assert len(management.users(rules, ROOT)) == 4
    assert management.users(rules, MEMBER) == []
    made = management.create_token(
        rules, ROOT, "team.all", now_ms=2, sha256="0" * 64, grants=["admin:>"]
    )
    assert management.tokens(made, LEAD, 3) == []


def test_others_change_nothing(rules: AccessRules) -> None:
    """Whatever other rights they have."""
    with pytest.raises(Forbidden):
        add(rules, MEMBER, "team.bob")
    with pytest.raises(Forbidden):
        management.change_quotas(rules, LEAD, default={})


# --- the last administrator -------------------------------------------------------------------------
def test_the_first_user_is_an_administrator() -> None:
    """Else nobody could make the second one; with a token in the settings, somebody can."""
    with pytest.raises(Conflict) as caught:
        add(AccessRules(), ROOT, "alice", grants=["publish:a"], password="x")
    assert caught.value.code == "no_administrator"
    with pytest.raises(Conflict):
        add(AccessRules(), ROOT, "root", grants=["admin:>"])  # it cannot log in
    add(AccessRules(), ROOT._replace(needs_administrator=False), "alice", grants=["publish:a"])
    add(AccessRules(), ROOT, "root", grants=["admin:>"], certificates=["root"])


def test_the_last_administrator_stays(rules: AccessRules) -> None:
    """Deleted, disabled or without its rights: refused."""
    rules = management.delete_user(rules, ROOT, "team.boss")
    for change in (
        lambda: management.delete_user(rules, ROOT, "root"),
        lambda: management.change_user(rules, ROOT, "root", disabled=True),
        lambda: management.change_user(rules, ROOT, "root", grants=["publish:>"]),
    ):
        with pytest.raises(Conflict) as caught:
            change()
        assert caught.value.code == "no_administrator"
    rules = management.create_token(
        rules, ROOT, "ops", now_ms=2, sha256="0" * 64, grants=["admin:>"]
    )
    management.delete_user(rules, ROOT, "root")


# --- mistakes ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda r: add(r, ROOT, "root"), "user_exists"),
        (lambda r: management.change_user(r, ROOT, "x"), "user_not_found"),
        (lambda r: management.delete_user(r, ROOT, "x"), "user_not_found"),
        (lambda r: management.revoke_token(r, ROOT, "x"), "token_not_found"),
        (lambda r: add(r, ROOT, "x", grants=["fly:a"]), "invalid_grant"),
        (lambda r: add(r, ROOT, "x", quotas={"wings": 2}), "invalid_quota"),
        (lambda r: add(r, ROOT, "x", quotas={"connections": -1}), "invalid_quota"),
        (
            lambda r: management.create_token(
                r, ROOT, "t", now_ms=5, sha256="0" * 64, grants=["admin:>"], expires=5
            ),
            "invalid_expiry",
        ),
        (
            lambda r: management.create_token(
                r, ROOT, "t", now_ms=5, sha256="0" * 64, user="other", grants=["publish:a"]
            ),
            "invalid_argument",
        ),
    ],
)
def test_a_mistake_has_a_code(rules: AccessRules, change: Any, code: str) -> None:
    """And a sentence."""
    with pytest.raises(HeadraceError) as caught:
        change(rules)
    assert caught.value.code == code
    assert isinstance(caught.value, (Conflict, NotFound, InvalidArgument))


def test_a_token_cannot_be_made_twice(rules: AccessRules) -> None:
    """The programs that have the first one would be locked out."""
    made = management.create_token(rules, ROOT, "t", now_ms=2, sha256="0" * 64)
    with pytest.raises(Conflict) as caught:
        management.create_token(made, ROOT, "t", now_ms=2, sha256="1" * 64)
    assert caught.value.code == "token_exists"
