"""Topics in Kafka: their names, and settings that would lose messages."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from headrace.engine.kafka.topics import NAME_CHARS_MAX, NEEDED, RIGHTS, KafkaTopics
from headrace.errors import HeadraceError, StorageFailed
from headrace.log.interface import TopicRecord
from headrace.model import TopicSettings
from headrace.testing import running_server, wait_until

kafka_test = pytest.mark.xdist_group("kafka")


def record(name: str, incarnation: int) -> TopicRecord:
    return TopicRecord(name, TopicSettings(), incarnation, 0)


def test_names_fit_into_kafka_and_do_not_collide() -> None:
    """The longest name is cut, and the incarnation keeps two topics apart."""
    topics = KafkaTopics(None, "c" * 40, 1.0, unsafe=False)  # type: ignore[arg-type]
    long = record("x" * 249, 1)
    assert len(topics.name_of(long)) == NAME_CHARS_MAX
    assert topics.name_of(long) != topics.name_of(record("x" * 249, 2))
    assert topics.name_of(record("orders", 0x1F)) == f"{'c' * 40}.orders.0000000000001f"


class Groups:
    """An admin client whose groups have no coordinator at first."""

    def __init__(self, *errors: int):
        self.errors = list(errors)

    def describe_topics(self, topics: TopicCollection, **_: Any) -> dict[str, Future[Any]]:
        return {name: described() for name in topics.topic_names}

    def describe_consumer_groups(self, names: list[str], **_: Any) -> dict[str, Future[Any]]:
        error = self.errors.pop(0) if self.errors else None
        return {name: described(error) for name in names}


def described(error: int | None = None) -> Future[Any]:
    future: Future[Any] = Future()
    if error is None:
        future.set_result(SimpleNamespace(authorized_operations=[*RIGHTS]))
    else:
        future.set_exception(KafkaException(KafkaError(error)))
    return future


def test_a_start_waits_for_the_coordinator_of_a_new_kafka() -> None:
    """A Kafka that has just been started has none for a second; that is no reason to give up."""
    moving = KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_LOAD_IN_PROGRESS
    admin: Any = Groups(*moving)
    KafkaTopics(admin, "shop", 10.0, unsafe=False).check_rights("shop.definitions", ["shop.nodes"])
    assert admin.errors == []
    for_ever: Any = Groups(*[KafkaError.NOT_COORDINATOR] * 1000)
    with pytest.raises(TimeoutError, match="the groups cannot be described"):
        KafkaTopics(for_ever, "shop", 0.05, unsafe=False).check_rights("shop.definitions", ["g"])


class ThreeKafkaNodes:
    """An admin client of a Kafka with three nodes, and one topic that is as Headrace creates it, but for ``wrong``."""

    def __init__(self, replicas: int, wrong: dict[str, str]):
        self.replicas = replicas
        self.config = {**NEEDED, "min.insync.replicas": "2", **wrong}

    def list_topics(self, **_: Any) -> Any:
        partition = SimpleNamespace(replicas=list(range(self.replicas)))
        topic = SimpleNamespace(partitions={0: partition}, error=None)
        return SimpleNamespace(brokers=dict.fromkeys(range(3)), topics={"shop.state": topic})

    def describe_configs(self, resources: list[Any], **_: Any) -> dict[Any, Future[Any]]:
        future: Future[Any] = Future()
        future.set_result({key: SimpleNamespace(value=v) for key, v in self.config.items()})
        return dict.fromkeys(resources, future)


@pytest.mark.parametrize(
    ("replicas", "wrong", "sentence"),
    [
        (1, {}, "shop.state has 1 replicas on 3 nodes"),
        (2, {}, "shop.state has 2 replicas on 3 nodes"),
        (3, {"min.insync.replicas": "1"}, "shop.state has min.insync.replicas=1 of 3"),
        (3, {"unclean.leader.election.enable": "true"}, "unclean.leader.election.enable=true"),
    ],
)
def test_a_topic_that_a_node_of_kafka_can_take_with_it_is_refused(
    replicas: int, wrong: dict[str, str], sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of three nodes, any may be lost; whoever accepts the loss says so, and is warned."""
    admin: Any = ThreeKafkaNodes(replicas, wrong)
    topics = KafkaTopics(admin, "shop", 1.0, unsafe=False)
    with pytest.raises(StorageFailed, match=r"Change them .* or start with kafka_unsafe") as caught:
        topics.check(topics.existing())
    assert (caught.value.code, caught.value.retryable) == ("kafka_topic_unsafe", False)
    assert sentence in caught.value.message
    told = KafkaTopics(admin, "shop", 1.0, unsafe=True)
    told.check(told.existing())
    assert sentence in caplog.text
    good: Any = ThreeKafkaNodes(3, {})
    topics = KafkaTopics(good, "shop", 1.0, unsafe=False)
    topics.check(topics.existing())


def change(servers: str, topic: str, name: str, value: str) -> None:
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": servers})
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(10)


@kafka_test
def test_settings_that_lose_messages_are_refused(cluster: dict[str, Any]) -> None:
    """A node does not start over such a topic, says which it is, and starts when it is told to."""
    state = f"{cluster['cluster']}.state"
    with running_server(**cluster) as server, server.client() as client:
        client.publish("orders", b"one")
    wrong = {
        "cleanup.policy": "compact",
        "retention.ms": "3600000",
        "unclean.leader.election.enable": "true",
    }
    for name, value in wrong.items():
        change(cluster["kafka_servers"], state, name, value)
    with pytest.raises(HeadraceError) as caught, running_server(**cluster):
        pass
    assert caught.value.code == "kafka_topic_unsafe"
    for name, value in wrong.items():
        assert f"{state} has {name}={value}" in caught.value.message
    with running_server(**cluster, kafka_unsafe=True) as server, server.client() as client:
        assert client.fetch("orders")[0].value == b"one"


@kafka_test
def test_a_topic_that_was_deleted_in_kafka_is_missed(cluster: dict[str, Any]) -> None:
    """What it held is gone, messages or positions or definitions, so the node does not go on as if it were empty."""
    with running_server(**cluster) as server, server.client() as client:
        client.publish("orders", b"one")
    admin = AdminClient({"bootstrap.servers": cluster["kafka_servers"]})
    for topic in ("orders.", "state", "definitions"):
        first = f"{cluster['cluster']}.{topic}"
        [name] = [n for n in admin.list_topics(timeout=10).topics if n.startswith(first)]
        admin.delete_topics([name], operation_timeout=10)[name].result(10)
        wait_until(lambda name=name: name not in admin.list_topics(timeout=10).topics)  # type: ignore[misc]
        with pytest.raises(HeadraceError) as caught, running_server(**cluster):
            pass
        assert caught.value.code == "kafka_topic_missing"
        assert name in caught.value.message
