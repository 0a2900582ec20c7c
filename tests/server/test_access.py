"""Rights on a running server: logins, revocation, wildcards, dead letters, commits, quotas."""

import base64
import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from headrace import BrokerClient
from headrace.access.directory import AccessDirectory
from headrace.access.file import NAME
from headrace.access.guessing import FREE
from headrace.broker.audit import TOPIC as AUDIT
from headrace.errors import (
    Closed,
    DataCorrupt,
    Forbidden,
    HeadraceError,
    QueueFull,
    TopicNotFound,
)
from headrace.log.batch import encode
from headrace.log.columns import Columns
from headrace.model import DEAD_LETTER_HEADERS
from headrace.testing import RunningServer, running_server
from tests.contract.raw_binary import AUTH, CLOSED, SUBSCRIBE, FrameSocket
from tests.contract.raw_text import TextSocket
from tests.server.access_rig import PASSWORD, ROOT, quick_passwords, text_as, token  # noqa: F401
from tests.server.http_rig import Events, Http, RawHttp, raw_request
from tests.server.http_websocket import WebSocket


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server(memory=True, token=ROOT) as running:
        yield running


@pytest.fixture
def root(server: RunningServer) -> Iterator[BrokerClient]:
    with server.client(token=ROOT) as client:
        yield client


def basic(user: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


# --- logins -----------------------------------------------------------------------------------------
def test_a_user_logs_in_everywhere(server: RunningServer, root: BrokerClient) -> None:
    """With a user and a password: text, binary, HTTP (also with a large body at once), WebSocket."""
    root.create_user(
        "alice", password=PASSWORD.replace(" ", "="), grants=["publish,consume:orders"]
    )
    password = PASSWORD.replace(" ", "=")
    with closing(Http(server.http_address)) as http:
        big = http.ask("POST", "/publish/orders", b"x" * 700_000, {
            **basic("alice", password), "Content-Type": "text/plain"})  # fmt: skip
        assert big.status == 200
        assert http.get("/access/whoami", basic("alice", password)).json["name"] == "user:alice"
        assert http.get("/access/whoami", basic("alice", "wrong")).status == 401
    text = TextSocket(server.address)
    text.send(f"AUTH alice {password}\r\nPUB orders 2\r\nhi\r\n".encode())
    assert text.line() == ["OK"]
    assert text.line() == ["OK", "1"]
    text.close()
    with server.client(token=None, user="alice", password=password) as client:
        assert client.whoami()["grants"] == ["publish,consume:orders"]
    headers = basic("alice", password)
    with WebSocket(server.http_address, authorization=headers["Authorization"]) as websocket:
        assert websocket.ok("publish", topic="orders", data=1)["type"] == "published"
        assert websocket.ask("publish", topic="users", data=1)["code"] == "forbidden"


@pytest.mark.parametrize("secret", ["alice wrong-horse", "nobody correct-horse", "alice"])
def test_a_wrong_password_ends_the_conversation(
    server: RunningServer, root: BrokerClient, secret: str
) -> None:
    """As a wrong token does."""
    root.create_user("alice", password="correct-horse", grants=["publish:orders"])
    text = TextSocket(server.address)
    with pytest.raises(HeadraceError) as caught:
        text.ask(f"AUTH {secret}")
    assert caught.value.code == "unauthenticated"
    with pytest.raises(Closed):
        text.line()
    text.close()


def test_requests_wait_for_the_login_in_their_order(
    server: RunningServer, root: BrokerClient
) -> None:
    """Several in one write: the first one logs in, and all are answered as they came."""
    root.create_user("alice", password=PASSWORD, grants=["publish:orders"])
    login = basic("alice", PASSWORD)["Authorization"]
    with RawHttp(server.http_address) as raw:
        for _ in range(2):
            parts = [raw_request("POST", f"/publish/{topic}", b"1", authorization=login)
                     for topic in ("orders", "users", "orders")]  # fmt: skip
            raw.send(*parts, raw_request("GET", "/access/whoami", authorization=login))
            assert [raw.answer().status for _ in range(4)] == [200, 403, 200, 200]


def test_the_body_of_a_stranger_is_not_kept(server: RunningServer, root: BrokerClient) -> None:
    """A wrong password is told before the rest of a large body has come."""
    root.create_user("alice", password=PASSWORD, grants=["publish:orders"])
    head = raw_request("POST", "/publish/orders", **basic_fields("alice", "wrong horse"),
                       content_length="50000000", content_type="text/plain")  # fmt: skip
    with RawHttp(server.http_address) as raw:
        raw.send(head, bytes(1000))
        assert raw.answer().status == 401


def basic_fields(user: str, password: str) -> dict[str, str]:
    return {"authorization": basic(user, password)["Authorization"]}


def test_one_connection_of_a_proxy_carries_many(server: RunningServer, root: BrokerClient) -> None:
    """Each HTTP request is its own sender's."""
    one, two = token(root, "one", "publish:one"), token(root, "two", "publish:two")
    with closing(Http(server.http_address)) as http:
        for _ in range(3):
            for secret, mine, other in ((one, "one", "two"), (two, "two", "one")):
                headers = {"Authorization": f"Bearer {secret}", "Content-Type": "text/plain"}
                assert http.ask("POST", f"/publish/{mine}", b"x", headers).status == 200
                refused = http.ask("POST", f"/publish/{other}", b"x", headers)
                assert (refused.status, refused.code) == (403, "forbidden")
        assert http.get("/topics").status == 401


def test_control_is_turned_on_while_it_runs(tmp_path: Path) -> None:
    """Connections that came before know nobody, and are nobody."""
    with running_server(tmp_path / "data") as server:
        before = TextSocket(server.address)
        assert before.ask("PUB orders 2", b"hi") == ["OK", "0"]
        with closing(Http(server.http_address)) as http:
            http.publish("orders", 1)
            AccessDirectory(server.data_dir).create_user(
                "root", certificates=["root"], grants=["admin:>"]
            )
            server.call(server.engine.access.look)
            answer = http.ask("POST", "/publish/orders", b"1", {"Content-Type": "application/json"})
            assert answer.status == 401
        assert before.line()[:2] == ["ERR", "login_ended"]
        before.close()


# --- revocation -------------------------------------------------------------------------------------
def test_a_revoked_token_is_out_everywhere(server: RunningServer, root: BrokerClient) -> None:
    """Open connections, running subscriptions, remembered heads: at once, without a word to wait for."""
    secret = token(root, "ci", "publish,consume,browse:orders")
    text, following = text_as(server, secret), text_as(server, secret)
    following.ask("SUB orders")
    frames = FrameSocket(server.address)
    frames.ask(AUTH, {"token": secret})
    websocket = WebSocket(server.http_address, f"/ws?token={secret}")
    websocket.ok("subscribe", topic="orders")
    stream = Events(server.http_address, f"/stream/orders?token={secret}")
    http = Http(server.http_address, secret)
    for _ in range(3):
        http.publish("orders", 1)
    assert text.ask("PUB orders 2", b"hi")[0] == "OK"
    root.revoke_token("ci")
    for each in (text, following):
        while (words := each.line())[0] == "MSG":
            pass
        assert words[:2] == ["ERR", "login_ended"]
        with pytest.raises(Closed):
            each.line()
        each.close()
    assert frames.read().properties["code"] == "login_ended"
    answer = http.ask("POST", "/publish/orders", b"1", {"Content-Type": "application/json"})
    assert answer.status == 401
    code, reason = websocket.closed()
    assert (code, reason) == (1008, "login_ended")
    while (event := stream.next()).name != "error":
        pass
    assert event.json["error"]["code"] == "login_ended"
    for each in (frames, http, websocket, stream):
        each.close()


def test_a_right_that_is_taken_away_ends_what_it_allowed(
    server: RunningServer, root: BrokerClient
) -> None:
    """The connection stays, the subscription ends; a cached publish is refused."""
    root.create_user("alice", grants=["publish,consume:>"])
    secret = root.create_token("laptop", user="alice")["secret"]
    text = text_as(server, secret)
    assert text.ask("PUB orders 2", b"hi")[0] == "OK"
    text.ask("SUB orders")
    frames = FrameSocket(server.address)
    frames.ask(AUTH, {"token": secret})
    root.create_subscription("email", "orders")
    frames.ask(SUBSCRIBE, {"subscription": "email", "topic": "orders", "ack": "manual"})
    root.change_user("alice", grants=["publish,consume:users"])
    assert text.line()[:2] == ["ERR", "forbidden"]
    with pytest.raises(HeadraceError) as caught:
        text.ask("PUB orders 2", b"hi")
    assert caught.value.code == "forbidden"
    assert text.ask("PUB users 2", b"hi")[0] == "OK"
    while (arrived := frames.next_arrival()).type != CLOSED:
        pass
    assert arrived.properties["code"] == "forbidden"
    assert root.subscription_stats("email")["members"] == 0
    text.close()
    frames.close()


def test_a_long_poll_answers_nothing_after_the_right_is_gone(
    server: RunningServer, root: BrokerClient
) -> None:
    """It had the right when it asked; the message came later, and stays where it is."""
    root.create_user("alice", grants=["consume:orders"])
    secret = root.create_token("laptop", user="alice")["secret"]
    root.create_subscription("email", "orders")
    with closing(Http(server.http_address, secret)) as http:
        http._connection.request(
            "GET",
            "/consume/orders?group=email&wait=30000",
            headers={"Authorization": f"Bearer {secret}"},
        )
        server.wait_until(lambda: server.engine.subscription("email").members)
        root.change_user("alice", grants=[])
        root.publish("orders", b"x")
        response = http._connection.getresponse()
        assert response.status == 403
    assert root.subscription_stats("email")["lag"] == 1


# --- wildcards --------------------------------------------------------------------------------------
def test_a_wildcard_sees_what_its_owner_may_read(server: RunningServer, root: BrokerClient) -> None:
    """Topics that exist, topics that come later, and rights that change."""
    for topic in ("team.a", "other.a"):
        root.publish(topic, b"old")
    root.create_user("alice", grants=["consume:team.>"])
    secret = root.create_token("laptop", user="alice")["secret"]
    with server.client(token=secret) as alice:
        follower = alice.subscribe(">")
        stats = alice.create_subscription("everything", ">")
        assert {each["topic"] for each in stats["partitions"]} == {"team.a"}
        for topic in ("team.b", "other.b", "team.a", "other.a"):
            root.publish(topic, topic.encode())
        found = {follower.get(timeout=10).topic for _ in range(2)}
        assert found == {"team.a", "team.b"}
        stats = alice.subscription_stats("everything")
        assert {each["topic"] for each in stats["partitions"]} == {"team.a", "team.b"}
        root.change_user("alice", grants=["consume:other.>"])
        server.wait_until(
            lambda: (
                {topic for topic, _ in server.engine.subscription("everything").cursors}
                == {"other.a", "other.b"}
            )
        )
        root.publish("team.a", b"hidden")
        root.publish("other.a", b"seen")
        assert follower.get(timeout=10).value == b"seen"


def test_a_delivery_is_settled_by_those_who_may_consume(
    server: RunningServer, root: BrokerClient
) -> None:
    """The number of somebody else's delivery settles nothing, and does not even say that it exists."""
    root.publish("secret", "x")
    mine, other = token(root, "a", "consume:secret:g"), token(root, "b", "consume:orders:g")
    with closing(Http(server.http_address, mine)) as http:
        delivery = http.consume("secret", ack="manual", group="g")["delivery"]
        with closing(Http(server.http_address, other)) as stranger:
            for path in ("/ack", "/nack", "/extend", "/ack/orders", "/ack/secret"):
                answer = stranger.ask("POST", path, {"delivery": delivery})
                assert answer.code == "stale_delivery"
        assert http.ok("POST", "/ack", {"delivery": delivery})["settled"] == 1


def test_a_member_needs_the_right_over_every_topic(
    server: RunningServer, root: BrokerClient
) -> None:
    """Of a wildcard that somebody else made; also over one that comes later."""
    root.publish("team.a", b"x")
    root.create_subscription("all", ">")
    some = token(root, "some", "consume:team.>")
    with server.client(token=some) as client:
        consumer = client.subscription("all")
        assert consumer.get(timeout=10).topic == "team.a"
        root.publish("other.a", b"secret")
        with pytest.raises(Forbidden):
            consumer.get(timeout=10)
        with pytest.raises(Forbidden):
            client.subscription("all").get(timeout=10)


def test_owners_survive_a_restart(tmp_path: Path) -> None:
    """So that a topic which comes later is not theirs, either."""
    with running_server(tmp_path / "data", token=ROOT) as server:
        with server.client() as root:
            secret = token(root, "ci", "consume:team.>")
            with server.client(token=secret) as client:
                client.create_subscription("all", ">")
        server.restart()
        with server.client() as root:
            root.publish("team.a", b"x")
            root.publish("other.a", b"x")
            found = root.subscription_stats("all")["partitions"]
            assert [each["topic"] for each in found] == ["team.a"]


def test_internal_topics_are_for_administrators_and_by_name(
    server: RunningServer, root: BrokerClient
) -> None:
    """Reading everything does not include the broker's own topics."""
    secret = token(root, "all", "publish,consume,browse,manage,metrics:>")
    with server.client(token=secret) as client:
        for topic in ("__pipelines", "__events", AUDIT, "__scheduled", "__staged"):
            with pytest.raises(TopicNotFound):
                client.fetch(topic)


# --- dead letters, schedules, commits ---------------------------------------------------------------
def bury(root: BrokerClient, subscription: str, topic: str) -> None:
    root.publish(topic, f"of {topic}")
    root.create_subscription(subscription, topic, max_deliveries=1)
    with root.subscription(subscription, topic) as consumer:
        consumer.nack(consumer.get(timeout=10))
        root.flush()


def test_a_letter_is_seen_by_those_who_may_see_its_origin(
    server: RunningServer, root: BrokerClient
) -> None:
    """As a letter, and in the dead-letter topic."""
    bury(root, "email", "orders")
    bury(root, "email", "payments")
    server.wait_until(lambda: dict(server.engine.dead_letters.topics()).get("email.dlq") == 2)
    secret = token(root, "ops", "browse,manage:orders:email", "browse,consume:email.dlq")
    with server.client(token=secret) as client:
        [letter] = client.dead_letters("email")
        assert letter.message.topic == "orders"
        with pytest.raises(Forbidden):
            client.dead_letter("email", 1)
        with pytest.raises(Forbidden):
            client.edit_dead_letter("email", 1, value=b"x")
        with pytest.raises(HeadraceError):
            client.fetch("email.dlq")
        assert client.purge_dead_letters("email") == 1
    assert [letter.message.topic for letter in root.dead_letters("email")] == ["payments"]


def test_a_forged_letter_goes_nowhere(server: RunningServer, root: BrokerClient) -> None:
    """It says that it came from a topic to which its author may not publish."""
    bury(root, "email", "orders")
    server.wait_until(lambda: dict(server.engine.dead_letters.topics()).get("email.dlq") == 1)
    root.publish("payments", b"genuine")
    secret = token(root, "ops", "publish,manage,browse:orders,email.dlq:email")
    with server.client(token=secret) as client:
        origin = {DEAD_LETTER_HEADERS[0]: "payments"}
        client.publish("email.dlq", b"forged", headers=origin)
        found = client.redrive("email")
    assert (found["redriven"], found["skipped"]) == (1, 1)
    assert "may not publish" in str(found["reason"])
    assert [message.value for message in root.fetch("payments")] == [b"genuine"]


def test_a_dead_letter_topic_is_no_way_to_publish(
    server: RunningServer, root: BrokerClient
) -> None:
    """Who may consume cannot make the broker write where it may not publish."""
    secret = token(root, "ci", "consume:orders")
    with server.client(token=secret) as client:
        with pytest.raises(Forbidden):
            client.create_subscription("mine", "orders", dead_letter_topic="payments")
        client.create_subscription("mine", "orders")


def test_pieces_go_only_where_one_may_publish(server: RunningServer, root: BrokerClient) -> None:
    """Staged by somebody else, whose id one has seen."""
    secret = token(root, "job", "publish:orders")
    piece = root.stage("payments", encode(Columns([b"x"])))
    with server.client(token=secret) as client:
        own = client.stage("orders", encode(Columns([b"x"])))
        for pieces in ([piece], [own, piece]):
            with pytest.raises(Forbidden):
                client.commit_staged("job", 1, pieces)
            with pytest.raises(Forbidden):
                client.abort_staged(pieces)
        bare = piece.partition("~")[0]
        for forged in (bare, bare.replace("payments", "orders"), piece.replace("payments", "orders"),
                       f"{bare}~~orders", own.replace("/1/1/", "/0/1/")):  # fmt: skip
            with pytest.raises(Forbidden):
                client.commit_staged("job", 1, [forged])
        assert client.commit_staged("job", 1, [own])
        due = Columns([b"x"], times=[root.info()["time"] + 3_600_000])
        later = client.stage("orders", encode(due), delayed=True)
        assert client.commit_staged("job", 2, [later])
        hidden = root.stage("payments", encode(due), delayed=True)
        with pytest.raises(Forbidden):
            client.commit_staged("job", 3, [hidden])
    assert [each.topic for each in root.scheduled()] == ["orders"]


def test_a_delayed_message_that_was_accepted_is_published(
    server: RunningServer, root: BrokerClient
) -> None:
    """Though its publisher has lost the right since. Whoever may manage the topic can cancel it."""
    secret = token(root, "ci", "publish:orders")
    with server.client(token=secret) as client:
        client.publish("orders", b"accepted", delay=1)
        cancelled = client.publish("orders", b"cancelled", delay=3600)
    root.revoke_token("ci")
    root.cancel(cancelled.id)
    server.wait_until(lambda: server.engine.partition("orders").log.end_offset == 1)
    assert [message.value for message in root.fetch("orders")] == [b"accepted"]
    assert root.scheduled("orders") == []


def test_a_wildcard_subscription_shows_only_topics_that_one_may_see(
    server: RunningServer, root: BrokerClient
) -> None:
    """Whoever may see one of its topics sees the subscription, and not the names of all others."""
    for topic in ("mine.a", "secret.a"):
        root.create_topic(topic)
    root.create_subscription("all", ">")
    with server.client(token=token(root, "ci", "publish:mine.>")) as client:
        for found in (client.subscription_stats("all"), *client.subscriptions()):
            assert [each["topic"] for each in found["partitions"]] == ["mine.a"]


def test_names_of_dead_letter_topics_are_shown_to_those_who_see_the_subscription(
    server: RunningServer, root: BrokerClient
) -> None:
    """A grant over all names is not one over all dead letters."""
    for team in ("mine", "secret"):
        root.publish(f"{team}.a", b"x")
        root.create_subscription(f"{team}-s", f"{team}.a", max_deliveries=1)
        with root.subscription(f"{team}-s") as consumer:
            consumer.nack(consumer.get(timeout=10))
            server.wait_until(
                lambda team=team: f"{team}-s.dlq" in dict(server.engine.dead_letters.topics())
            )
    with server.client(token=token(root, "ci", "browse:mine.>")) as client:
        assert client.dead_letter_topics() == [{"topic": "mine-s.dlq", "letters": 1}]
        assert client.dead_letters("secret-s") == []


# --- quotas -----------------------------------------------------------------------------------------
def test_quotas_refuse(server: RunningServer, root: BrokerClient) -> None:
    """Connections, topics, partitions, subscriptions: with a code, and over HTTP with 429."""
    quotas = {"connections": 2, "topics": 2, "partitions": 3, "subscriptions": 1}
    secret = token(root, "ci", "publish,consume,manage:team.>", quotas=quotas)
    with server.client(token=secret) as client:
        client.publish("team.a", b"x")
        client.create_topic("team.b", partitions=2)
        for refused in (
            lambda: client.create_topic("team.c"),
            lambda: client.change_topic("team.b", partitions=3),
            lambda: client.subscribe("team.c"),
            lambda: client.create_subscription("s", "team.c"),
        ):
            with pytest.raises(QueueFull) as caught:
                refused()
            assert caught.value.code == "quota_exceeded"
        client.create_subscription("s", "team.a")
        with pytest.raises(QueueFull):
            client.create_subscription("t", "team.a")
        with closing(Http(server.http_address, secret)) as http:
            answer = http.ask("POST", "/publish/team.c", b"1", {"Content-Type": "text/plain"})
            assert (answer.status, answer.code) == (429, "quota_exceeded")
            assert answer.headers["retry-after"]
            third = FrameSocket(server.address)
            with pytest.raises(QueueFull) as caught:
                third.ask(AUTH, {"token": secret})
            assert caught.value.code == "quota_exceeded"
            third.close()
        server.wait_until(lambda: len(server.server.hub.connections) == 2)
        with server.client(token=secret) as again:
            again.info()


def test_a_rate_slows(server: RunningServer, root: BrokerClient) -> None:
    """The connection is not read until the debt is paid; nothing is refused."""
    secret = token(root, "ci", "publish:team.>", quotas={"requests_per_second": 100})
    text = text_as(server, secret)
    for _ in range(150):
        text.send(b"PUB team.a 1\r\nx\r\n")
    answers = [text.line() for _ in range(150)]
    assert all(words[0] == "OK" for words in answers)

    def paused() -> bool:
        [meter] = server.engine.access.meters._principals.values()
        return meter.requested(0) > 0

    assert server.call(paused)
    text.close()


def test_addresses_have_quotas(server: RunningServer, root: BrokerClient) -> None:
    """For those who have not logged in, too."""
    root.change_quotas(addresses={"connections": 3})
    sockets = [TextSocket(server.address) for _ in range(4)]
    refused = 0
    for each in sockets:
        try:
            each.ask("PING")
        except (Closed, OSError):
            refused += 1
    assert refused >= 1
    for each in sockets:
        each.close()
    root.change_quotas(addresses={})
    assert root.change_quotas() == {"addresses": {}, "default": {}}


# --- guessing ---------------------------------------------------------------------------------------
def test_guessing_is_slowed_logged_and_counted(
    server: RunningServer, root: BrokerClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Tokens and passwords, over any protocol; whoever is there, or has a token, does not wait."""
    logins = server.server.hub.logins
    made = token(root, "ci", "publish:a")
    with caplog.at_level(logging.WARNING, "headrace.server"):
        for number in range(FREE):
            with closing(Http(server.http_address, f"wrong{number}")) as http:
                assert http.get("/topics").status == 401
    assert logins.failed == FREE
    assert logins.delayed == 0
    assert 1 <= len([r for r in caplog.records if "failed login" in r.message]) < FREE
    server.call(lambda: [logins.guesses.failed("127.0.0.1") for _ in range(4)])
    assert not server.call(lambda: logins.guesses.is_free("127.0.0.1"))
    text = text_as(server, made)  # made by the broker: nobody guesses it
    text.close()
    with closing(Http(server.http_address, ROOT)) as http:  # right, but it waits for its turn
        assert http.get("/topics").status == 200
    assert logins.delayed + logins.refused >= 1
    with closing(Http(server.http_address, made)) as http:
        assert http.get("/metrics").status == 403
    with closing(Http(server.http_address, ROOT)) as http:
        metrics = http.get("/metrics").body
    assert b'logins_failed_total{outcome="wrong"} 10.0' in metrics


def test_a_secret_is_never_logged(
    server: RunningServer, root: BrokerClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a token nor a password, right or wrong."""
    with caplog.at_level(logging.DEBUG):
        text = TextSocket(server.address)
        with pytest.raises(HeadraceError):
            text.ask("AUTH hunter2hunter2")
        text.close()
        other = TextSocket(server.address)
        with pytest.raises(HeadraceError):
            other.ask("AUTH ali\x1b[2Jce hunter3hunter3")
        other.close()
    assert "hunter" not in caplog.text
    assert "\x1b" not in caplog.text


# --- a broken file ----------------------------------------------------------------------------------
def test_a_broken_access_file_is_never_allow_all(tmp_path: Path) -> None:
    """A broker does not start with one; one that runs keeps the rules and says so."""
    with running_server(tmp_path / "data") as server:
        AccessDirectory(server.data_dir).create_user("root", certificates=["r"], grants=["admin:>"])
        secret = AccessDirectory(server.data_dir).create_token("a", grants=["admin:>"])["secret"]
        server.call(server.engine.access.look)
        path = server.data_dir / NAME
        path.write_bytes(path.read_bytes()[:100])
        server.call(server.engine.access.look)
        with closing(Http(server.http_address)) as http:
            assert http.get("/topics").status == 401
            ready = http.get("/health/ready")
            assert ready.status == 503
            assert "access file" in ready.json["reasons"][0]
        with closing(Http(server.http_address, secret)) as http:
            assert b"message_broker_access_broken 1.0" in http.get("/metrics").body
        server.stop()
        with pytest.raises(DataCorrupt):
            server.start()
