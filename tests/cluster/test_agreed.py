"""What follows from the definitions, in their order."""

from headrace.access.rights import parse_grant
from headrace.access.rules import AccessRules, AccessToken, Quotas, User
from headrace.cluster.agreed import Agreed, changed_rules, deleted, entry
from headrace.log.interface import TopicRecord
from headrace.log.storage import settings_content
from headrace.model import TopicSettings

ALICE = User(name="alice", created=1, password="hash", grants=(parse_grant("admin:>"),))
CI = AccessToken(name="ci", created=2, sha256="a" * 64, user="alice", expires=9)
RULES = AccessRules(version=3, key="k", users=(ALICE,), tokens=(CI,), default=Quotas(memory=7))
ORDERS = TopicRecord("orders", TopicSettings(), 7, 1000)


def folded(*payloads: bytes) -> Agreed:
    agreed = Agreed()
    for payload in payloads:
        agreed.fold(payload)
    return agreed


def subscription(name: str, topic: str) -> bytes:
    return entry(kind="subscription", name=name, topic=topic, settings={}, created_ms=1)


def test_a_deleted_topic_takes_its_subscriptions_along() -> None:
    """Those on it alone, and not a wildcard."""
    agreed = folded(
        settings_content(ORDERS),
        subscription("email", "orders"),
        subscription("audit", ">"),
        deleted(ORDERS),
    )
    assert agreed.topics == {}
    assert list(agreed.subscriptions) == [(">", "audit")]


def test_a_late_deletion_does_not_reach_a_later_topic() -> None:
    """A topic of the same name that was created since has another number."""
    later = ORDERS._replace(incarnation=8)
    agreed = folded(
        settings_content(ORDERS), deleted(ORDERS), settings_content(later), deleted(ORDERS)
    )
    assert agreed.topics == {"orders": later}


def test_the_first_secret_counts() -> None:
    """Two nodes may found a cluster at the same time."""
    agreed = folded(entry(kind="secret", secret="a"), entry(kind="secret", secret="b"))
    assert agreed.secret == "a"


def test_a_snapshot_says_the_same() -> None:
    """A node that begins with a checkpoint knows what one knows that has read everything."""
    agreed = folded(
        entry(kind="secret", secret="a"),
        settings_content(ORDERS),
        subscription("email", "orders"),
        entry(kind="producer", name="importer", id=5, epoch=0),
        entry(kind="producer", name="importer", id=5, epoch=1),
        *changed_rules(None, RULES),
    )
    again = folded(*agreed.snapshot())
    assert vars(again) == vars(agreed)
    assert again.producers == {"importer": (5, 1)}


def test_a_change_of_rules_says_what_has_changed() -> None:
    """Nothing for the same rules; else the users and tokens that differ, and the rest."""
    bob = User(name="bob", created=3)
    assert changed_rules(RULES, RULES) == []
    later = RULES.with_user(bob)
    changes = changed_rules(RULES, later)
    assert len(changes) == 2
    assert b"alice" not in b"".join(changes)
    assert folded(*changed_rules(None, RULES), *changes).rules == later


def test_deleted_users_and_revoked_tokens_are_gone() -> None:
    """With a user go its tokens."""
    other = RULES.with_user(User(name="bob", created=3))
    last = other.without_user("alice")
    found = folded(*changed_rules(None, other), *changed_rules(other, last)).rules
    assert found == last
    assert [user.name for user in found.users] == ["bob"]
    assert found.tokens == ()


def test_rules_are_in_force_when_their_last_entry_is_read() -> None:
    """A user alone is no rule: without rules everybody may do everything, and half of them would lock out."""
    *first, last = changed_rules(None, RULES)
    agreed = folded(*first)
    assert agreed.rules is None
    agreed.fold(last)
    assert agreed.rules == RULES
