"""Users and tokens of a cluster: every node has the same, at once and after restarts."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from argon2 import PasswordHasher

from headrace import BrokerClient
from headrace.access import hashing
from headrace.access.directory import AccessDirectory
from headrace.access.file import NAME, AccessFile
from headrace.errors import Conflict, Forbidden, Unauthenticated
from headrace.testing import wait_until
from tests.fixtures.three_nodes import ThreeNodes

pytestmark = pytest.mark.xdist_group("kafka")
ROOT = {"user": "root", "password": "a long password"}


@pytest.fixture(scope="module")
def guarded(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreeNodes]:
    """Three nodes; the data directory of the second had an administrator before the first start."""
    quick = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashing, "_hasher", quick)
        directory = tmp_path_factory.mktemp("guarded")
        (directory / "node1").mkdir()
        rules = AccessDirectory(directory / "node1")
        rules.create_user("root", password=ROOT["password"], grants=["admin:>"])
        nodes = ThreeNodes(kafka, directory)
        try:
            wait_until(lambda: all(node.engine.access.is_on for node in nodes.nodes), 20.0)
            yield nodes
        finally:
            nodes.close()


def logged_in(nodes: ThreeNodes, number: int, **login: Any) -> BrokerClient:
    client = nodes.nodes[number].client(**(login or ROOT))
    client.connect()
    return client


def is_refused(nodes: ThreeNodes, number: int, **login: Any) -> bool:
    client = nodes.nodes[number].client(**login)
    try:
        client.connect()
        client.whoami()
    except Unauthenticated:
        return True
    finally:
        client.close()
    return False


def test_the_file_of_one_node_is_given_to_all(guarded: ThreeNodes) -> None:
    """The administrator of one data directory administers every node, and nobody enters without a login."""
    for number in range(3):
        with logged_in(guarded, number) as client:
            assert client.whoami()["administrator"]
            assert [user["user"] for user in client.users()] == ["root"]
        with guarded.nodes[number].client() as stranger, pytest.raises(Unauthenticated):
            stranger.topics()


def test_a_user_logs_in_at_every_node_at_once(guarded: ThreeNodes) -> None:
    """New users, new tokens, new passwords and new rights count at all nodes when the change is answered."""
    with logged_in(guarded, 0) as root, logged_in(guarded, 1) as other:
        root.create_topic("orders", partitions=6)
        root.create_user("alice", password="first password", grants=["publish:orders"])
        for number in range(3):
            login = {"user": "alice", "password": "first password"}
            with logged_in(guarded, number, **login) as alice:
                for partition in range(6):
                    alice.publish("orders", b"1", partition=partition)
                with pytest.raises(Forbidden):
                    alice.fetch("orders", 0, partition=0)
        other.change_user("alice", password="second password", grants=["browse:orders"])
        for number in range(3):
            assert is_refused(guarded, number, user="alice", password="first password")
            with logged_in(guarded, number, user="alice", password="second password") as alice:
                assert alice.fetch("orders", 0, partition=0)
                with pytest.raises(Forbidden):
                    alice.publish("orders", b"2")
        secret = root.create_token("ci", user="alice")["secret"]
        for number in range(3):
            with logged_in(guarded, number, token=secret) as ci:
                assert ci.whoami()["name"] == "user:alice"
        other.delete_user("alice")
        for number in range(3):
            assert is_refused(guarded, number, user="alice", password="second password")
            assert is_refused(guarded, number, token=secret)


def test_open_connections_of_a_deleted_user_end_at_every_node(guarded: ThreeNodes) -> None:
    """Also at a node that was not asked to delete it."""
    with logged_in(guarded, 0) as root:
        secret = root.create_token("watcher", grants=["browse:>"])["secret"]
        clients = [logged_in(guarded, number, token=secret) for number in range(3)]
        for client in clients:
            assert client.whoami()["name"] == "token:watcher"
        root.revoke_token("watcher")
        for client in clients:
            with pytest.raises(Unauthenticated):
                client.whoami()
            client.close()


def test_changes_at_several_nodes_do_not_undo_each_other(guarded: ThreeNodes) -> None:
    """Each is decided with all that was changed before; of two users of one name there is one."""

    def create(number: int) -> str:
        with logged_in(guarded, number % 3) as root:
            root.create_user(f"worker{number}", grants=["consume:>"])
            try:
                root.create_user("the-one", grants=["consume:>"])
            except Conflict as error:
                return error.code
            return "created"

    with ThreadPoolExecutor(3) as pool:
        assert sorted(pool.map(create, range(6))) == ["created", *["user_exists"] * 5]
    for number in range(3):
        with logged_in(guarded, number) as root:
            names = {user["user"] for user in root.users()}
            assert names >= {"root", "the-one", *(f"worker{n}" for n in range(6))}


def test_a_part_of_the_rights_is_not_enough_for_the_cluster(guarded: ThreeNodes) -> None:
    """Its status needs metrics, and draining a node takes an administrator of everything, not of a namespace."""
    with logged_in(guarded, 0) as root:
        tokens = {
            name: root.create_token(name, grants=[grant])["secret"]
            for name, grant in (
                ("reader", "browse:>"),
                ("watch", "metrics:>"),
                ("lead", "admin:team.>"),
            )
        }
        node = root.cluster_status()["nodes"][1]["node"]
    with logged_in(guarded, 0, token=tokens["reader"]) as reader:
        assert reader.info()["cluster"] is None
        with pytest.raises(Forbidden):
            reader.cluster_status()
    with logged_in(guarded, 1, token=tokens["watch"]) as watch:
        assert watch.info()["cluster"] == watch.cluster_status()["cluster"]
        with pytest.raises(Forbidden):
            watch.drain_node(node)
    for number in range(3):
        with logged_in(guarded, number, token=tokens["lead"]) as lead, pytest.raises(Forbidden):
            lead.drain_node(node)
    assert not any(each.engine.cluster.drained for each in guarded.nodes)


def test_the_last_administrator_stays(guarded: ThreeNodes) -> None:
    """As with one broker."""
    with logged_in(guarded, 2) as root, pytest.raises(Conflict, match="nobody could administer"):
        root.delete_user("root")


def test_rules_survive_a_restart_of_all_nodes(guarded: ThreeNodes) -> None:
    """Without any access file, and before the first client is listened to; a file does not bring a deleted user back."""
    with logged_in(guarded, 0) as root:
        root.create_user("carol", password="her password")
        root.change_user("root", password="another password")
    login = {"user": "root", "password": "another password"}
    try:
        guarded.restart()
        for number in range(3):
            assert is_refused(guarded, number, **ROOT)
            with logged_in(guarded, number, **login) as client:
                assert "carol" in {user["user"] for user in client.users()}
            with logged_in(guarded, number, user="carol", password="her password") as carol:
                assert not carol.whoami()["administrator"]
    finally:
        with logged_in(guarded, 0, **login) as root:
            root.change_user("root", password=ROOT["password"])


def test_a_backup_holds_the_rules_of_the_cluster(guarded: ThreeNodes, tmp_path: Path) -> None:
    """As an access file that a single broker can use."""
    node = guarded.nodes[0]
    (tmp_path / NAME).write_bytes(node.call(node.engine.access.store.content))
    assert AccessFile(tmp_path).read() == node.engine.access.rules
