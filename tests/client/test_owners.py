"""Which connection a publish takes in a cluster, without a network. ``tests/cluster/test_direct.py`` has the real one."""

import asyncio

from headrace.client.owners import Owners, Question
from headrace.errors import Closed, ConnectionLost, QueueFull
from headrace.wire.binary import Frame, Type
from tests.client.rig import FakeLink, FakeWire, Request, Rig, run, until

MAIN, OTHER = "a:1", "b:1"


class TwoNodes(Rig):
    """The main node, and a connection to another one."""

    def __init__(self) -> None:
        super().__init__()
        self.link.node = MAIN
        self.other = FakeLink()
        self.other.node = OTHER
        self.owners = self.producer.owners
        self.owners._links[OTHER] = self.other  # type: ignore[assignment]

    def move(self, owner: str) -> None:
        self.owners.heard("orders", 0, {"owner": owner}, self.link)  # type: ignore[arg-type]

    async def elsewhere(self) -> list[Request]:
        await self.settle()
        return [] if self.other.wire is None else self.other.wire.take()

    def lose_other(self, *unanswered: Request) -> None:
        self.other.wire = None
        for request in unanswered:
            request.lose()
        self.owners._links.pop(OTHER)
        self.producer.reconnect()


@run
async def test_a_broker_alone_is_the_only_way() -> None:
    """Without a node's name, nothing is looked up and nobody else is connected to."""
    rig = Rig()
    assert not rig.producer.owners.is_active
    rig.publish(b"a")
    (await rig.one()).store(0)
    assert rig.producer.owners._owners == {}


@run
async def test_an_answer_that_names_the_owner_sends_the_next_batch_there() -> None:
    """Without asking for the map."""
    rig = TwoNodes()
    rig.publish(b"a")
    (await rig.one()).store(0, owner=OTHER)
    rig.publish(b"b")
    assert [request.values for request in await rig.elsewhere()] == [[b"b"]]
    assert await rig.sent() == []


@run
async def test_the_way_changes_when_nothing_is_under_way() -> None:
    """Else a batch could overtake the one before it."""
    rig = TwoNodes()
    rig.publish(b"a")
    first = await rig.one()
    rig.move(OTHER)
    rig.publish(b"b")
    assert await rig.sent() == []
    assert await rig.elsewhere() == []
    first.store(0, owner=OTHER)
    assert [request.values for request in await rig.elsewhere()] == [[b"b"]]


@run
async def test_what_was_under_way_to_a_lost_owner_goes_to_the_main_node() -> None:
    """With the same numbers, so that it is stored once; and what waits follows it."""
    rig = TwoNodes()
    rig.move(OTHER)
    rig.publish(b"a")
    (lost,) = await rig.elsewhere()
    rig.publish(b"b")
    rig.lose_other(lost)
    again = await rig.one()
    assert (again.values, again.identity) == ([b"a"], lost.identity)
    again.store(7, duplicate=True)
    (await rig.one()).store(8)
    assert (rig.offset(b"a"), rig.offset(b"b")) == (7, 8)


@run
async def test_while_the_main_node_is_away_other_owners_are_served() -> None:
    """And what was under way to the main one waits for it."""
    rig = TwoNodes()
    rig.owners.heard("orders", 1, {"owner": OTHER}, rig.link)  # type: ignore[arg-type]
    rig.publish(b"a")
    lost = await rig.one()
    rig.go_down(lost)
    rig.publish(b"b", partition=1)
    (other,) = await rig.elsewhere()
    other.store(0)
    assert rig.offset(b"b") == 0
    rig.come_up()
    assert (await rig.one()).identity == lost.identity


@run
async def test_a_reconnected_main_node_does_not_get_what_is_under_way_elsewhere() -> None:
    """It would be sent twice, and answered twice."""
    rig = TwoNodes()
    rig.move(OTHER)
    rig.publish(b"a")
    (request,) = await rig.elsewhere()
    rig.go_down()
    rig.come_up()
    assert await rig.sent() == []
    request.store(3)
    assert rig.offset(b"a") == 3


@run
async def test_a_node_that_stops_is_no_error() -> None:
    """Its refusal is tried again through the main node."""
    rig = TwoNodes()
    rig.move(OTHER)
    rig.publish(b"a")
    (request,) = await rig.elsewhere()
    request.refuse(Closed("the log is closed"))
    await until(lambda: rig.link.wire is not None and rig.link.wire.requests)
    again = await rig.one()
    assert again.identity == request.identity
    again.store(0)
    assert rig.offset(b"a") == 0


@run
async def test_a_refusal_that_may_pass_is_tried_again_after_the_connection_was_lost_meanwhile() -> (
    None
):
    """Nothing is forgotten between the refusal, the pause and the new connection."""
    rig = TwoNodes()
    rig.publish(b"a")
    (await rig.one()).refuse(QueueFull("later"))
    rig.go_down()
    (lane,) = rig.producer._lanes.values()
    await until(lambda: lane._is_broken)  # the pause is over, and there is no connection
    rig.come_up()
    (await rig.one()).store(0)
    assert rig.offset(b"a") == 0


class Asked:
    """A link whose answers the test gives."""

    def __init__(self, node: str):
        self.node = node
        self.asked: list[asyncio.Future[Frame]] = []
        self.bodies: list[bytes] = []
        self.wire = FakeWire()
        self.wire.writable = self._writable  # type: ignore[attr-defined]

    async def _writable(self) -> None: ...

    async def ready(self) -> FakeWire:
        return self.wire

    async def ask(self, type: int, properties: object, body: bytes, **more: object) -> Frame:
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self.asked.append(future)
        self.bodies.append(body)
        return await future


@run
async def test_batches_keep_their_order_when_the_owner_changes() -> None:
    """Those that follow wait until the ones before are answered; one that was lost is sent again before them."""
    main, other = Asked(MAIN), Asked(OTHER)
    owners = Owners(main, lambda: None)  # type: ignore[arg-type]
    owners._links[OTHER] = other  # type: ignore[assignment]

    def send(body: bytes) -> asyncio.Task[Frame]:
        return asyncio.create_task(
            owners.send(("orders", 0), Question(Type.PUBLISH_BATCH, {}, body), 30.0)
        )

    async def turns() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    tasks = [send(b"1"), send(b"2")]
    await turns()
    assert main.bodies == [b"1", b"2"]
    main.asked[0].set_result(Frame(Type.ACK, 0, {"owner": OTHER}))
    tasks += [send(b"3"), send(b"4")]
    await turns()
    assert other.bodies == []
    main.asked[1].set_result(Frame(Type.ACK, 0, {"owner": OTHER}))
    await turns()
    assert other.bodies == [b"3", b"4"]
    for future in other.asked:
        future.set_exception(ConnectionLost("gone"))
    owners._links.pop(OTHER)
    await turns()
    assert main.bodies[2:] == [b"3", b"4"]
    for future in main.asked[2:]:
        future.set_result(Frame(Type.ACK, 0, {}))
    await asyncio.gather(*tasks)
    assert owners._series == {}
