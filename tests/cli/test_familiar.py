"""Verbs that people know from other small brokers, as their manuals write them."""

from headrace.client.threads import BrokerClient
from tests.cli.rig import Command


def test_the_verbs_in_the_order_of_a_manual(headrace: Command, client: BrokerClient) -> None:
    """Create, subscribe, publish, join: with the options and the defaults that are expected."""
    assert headrace("create-topic", "events", "--partitions", "1").code == 0
    assert headrace("create-subscription", "my-group", "events", "--offset", "0").code == 0
    assert headrace("publish", "events", "Hello World").code == 0
    assert headrace("join-subscription", "my-group", "-n", "1").lines == ["events/0@0  Hello World"]
    assert headrace("subscribe", "events", "--offset", "0", "-n", "1").lines == [
        "events/0@0  Hello World"
    ]


def test_members_share_a_subscription(headrace: Command, client: BrokerClient) -> None:
    """Members of a subscription share its messages: each message goes to one of them."""
    client.publish_many("shared", [b"%d" % number for number in range(5)])
    with client.subscription("pair", "shared", prefetch=1) as other:
        first = other.get(30)
        ran = headrace("join-subscription", "pair", "-n", "4")
        first.ack()
    assert first.text() == "0"
    assert [line.split()[-1] for line in ran.lines] == ["1", "2", "3", "4"]
    assert client.subscription_stats("pair")["lag"] == 0
