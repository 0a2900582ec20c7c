"""Grants: what they allow, how they are written, and which is a part of which."""

import pytest

from headrace.access.rights import Grant, covers, grant_text, is_allowed, is_within, parse_grant
from headrace.errors import InvalidArgument


@pytest.mark.parametrize(
    ("pattern", "other", "expected"),
    [
        (">", "orders", True),
        (">", "orders.eu.new", True),
        (">", ">", True),
        (">", "*", True),
        ("orders", "orders", True),
        ("orders", "orders.eu", False),
        ("orders.>", "orders", False),
        ("orders.>", "orders.eu", True),
        ("orders.>", "orders.>", True),
        ("orders.>", "orders.*.x", True),
        ("orders.>", ">", False),
        ("orders.*", "orders.eu", True),
        ("orders.*", "orders.*", True),
        ("orders.*", "orders.>", False),
        ("orders.eu", "orders.*", False),
        ("*.eu", "orders.eu", True),
        ("*", "orders.eu", False),
        ("*.*", "*.>", False),
        ("team.>", "teammate.x", False),
        (">", "__audit", False),
        ("__audit", "__audit", True),
        ("orders.>", "orders.email.dlq", True),
    ],
)
def test_covers(pattern: str, other: str, expected: bool) -> None:
    """Everything that the second matches is matched by the first; the broker's topics only by name."""
    assert covers(pattern, other) is expected


def test_a_grant_gives_its_rights_over_its_patterns() -> None:
    """And no other; ``admin`` is all of them."""
    grants = (
        parse_grant("publish,browse:orders.>"),
        parse_grant("consume:orders.>:billing.*"),
        parse_grant("admin:team.>:team.>"),
    )
    assert is_allowed(grants, "publish", "orders.eu")
    assert not is_allowed(grants, "publish", "users")
    assert not is_allowed(grants, "manage", "orders.eu")
    assert is_allowed(grants, "consume", "orders.eu", "billing.a")
    assert not is_allowed(grants, "consume", "orders.eu", "email")
    assert is_allowed(grants, "consume")
    assert not is_allowed(grants, "metrics", "orders.eu")
    for right in ("publish", "consume", "browse", "manage", "metrics", "admin"):
        assert is_allowed(grants, right, "team.a", "team.s")  # type: ignore[arg-type]
        assert not is_allowed(grants, right, "team.a", "other")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("grant", "within"),
    [
        ("publish:team.a:team.x", True),
        ("publish,manage:team.>:team.>", True),
        ("admin:team.sub.>:team.sub.>", True),
        ("publish:team.a", False),
        ("publish:>:team.x", False),
        ("publish:other:team.x", False),
        ("publish:team.a,other:team.x", False),
        ("metrics:orders:email", False),
        ("consume:orders:email", True),
        ("publish:__audit:team.x", False),
    ],
)
def test_within(grant: str, within: bool) -> None:
    """Nobody gives more than it has."""
    held = (parse_grant("admin:team.>:team.>"), parse_grant("consume:orders"))
    assert is_within(parse_grant(grant), held) is within


@pytest.mark.parametrize(
    "text", ["publish:orders.>", "publish,consume:a,b.*:c", "admin:>", "browse:__audit"]
)
def test_a_grant_is_written_as_it_is_read(text: str) -> None:
    """The notation loses nothing."""
    assert grant_text(parse_grant(text)) == text


def test_only_a_whole_grant_makes_an_administrator() -> None:
    """Over all topics and all names."""
    assert parse_grant("admin:>").is_whole
    assert not parse_grant("admin:>:team.>").is_whole
    assert not parse_grant("admin:team.>").is_whole
    assert not parse_grant("manage,publish,consume,browse,metrics:>").is_whole


@pytest.mark.parametrize(
    "text",
    ["", "fly:orders", "publish:a b", "publish:a:b:c", "publish:>.a", "publish::__x", ":a",
     "publish", "publish:", "admin:", "admin::", "admin:>:", "publish:,", "publish:__>"],
)  # fmt: skip
def test_a_bad_grant_is_refused(text: str) -> None:
    """With a sentence. An empty part, such as a variable that is not set, is never everything."""
    with pytest.raises(InvalidArgument):
        parse_grant(text)


def test_a_grant_without_topics_is_refused() -> None:
    """Nothing stands for everything by accident."""
    with pytest.raises(InvalidArgument):
        Grant(("publish",), ()).check()
