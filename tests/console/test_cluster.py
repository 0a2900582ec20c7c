"""The page of a cluster, over real nodes, in a real browser."""

from collections.abc import Iterator

import pytest

from headrace.testing import wait_until
from tests.console.browser import Browser
from tests.console.test_pages import AXE, base_of
from tests.fixtures.three_nodes import ThreeNodes

pytestmark = pytest.mark.xdist_group("kafka")


@pytest.fixture
def page(look: Browser, three_nodes: ThreeNodes) -> Iterator[Browser]:
    """The console of the first of three nodes, with a topic in every slot and a subscription that is behind."""
    with three_nodes.nodes[0].client() as client:
        client.create_topic("orders", partitions=6)
        client.create_subscription("email", "orders")
        for number in range(21):
            for _ in range(number % 6 + 1):
                client.publish("orders", b"x", partition=number % 6)
    look.errors()
    look.open(base_of(three_nodes.nodes[0]))
    look.find("main h1")
    yield look
    assert look.errors() == []


def addresses(nodes: ThreeNodes) -> list[str]:
    return [f"127.0.0.1:{node.port}" for node in nodes.nodes]


def test_a_cluster_is_shown_and_a_node_drained(page: Browser, three_nodes: ThreeNodes) -> None:
    """Nodes with their slots and lags; draining asks first, moves all slots, and is shown."""
    page.click("#menu a[href='#/cluster']")
    page.says("Cluster three-", "h1")
    page.says("All is well", "#attention")
    names = addresses(three_nodes)
    with three_nodes.nodes[1].client() as client:
        status = client.cluster_status()
    for node in status["nodes"]:
        page.says(node["node"], "#nodes")
        page.says(f"{node['lag']:,}", "#nodes")
    lanes = page.driver.execute_script(
        "return [...document.querySelectorAll('.lanes > li')].map((lane) => [lane.querySelector('.lane-name').firstChild.data,"
        "[...lane.querySelectorAll('.slot')].map((slot) => Number(slot.firstChild.data))])"
    )
    assert dict(lanes) == {node["node"]: node["slots"] for node in status["nodes"]}
    assert page.driver.execute_script("return document.querySelectorAll('.slot.behind-4').length")
    page.click(f"[data-focus='drain-{names[2]}']")
    page.says(f"Drain {names[2]}?", "dialog")
    page.button("Close", "dialog")
    assert not three_nodes.nodes[2].engine.cluster.drained
    page.click(f"[data-focus='drain-{names[2]}']")
    page.button("Drain the node", "dialog")
    page.says(f"{names[2]} is drained", "#attention")
    page.says("0 slots", ".lanes")
    wait_until(
        lambda: not three_nodes.nodes[2].call(lambda: set(three_nodes.nodes[2].engine.state))
    )
    assert not page.has(f"[data-focus='drain-{names[2]}']")
    three_nodes.nodes[2].restart()
    three_nodes.wait_until_ready()
    page.says("All is well", "#attention")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_is_accessible_and_fits_a_phone(page: Browser, theme: str) -> None:
    """axe finds nothing serious, and nothing is wider than the screen."""
    page.go("#/cluster")
    page.find(".slot")
    page.theme(theme)
    page.driver.execute_script(AXE)
    found = page.driver.execute_async_script(
        "const done = arguments[0]; axe.run(document).then((result) => done(result.violations"
        ".filter((each) => ['serious', 'critical'].includes(each.impact)).map((each) => each.id)))"
    )
    assert found == []
    page.driver.set_window_size(400, 800)
    try:
        wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.driver.execute_script(wide) <= 0
    finally:
        page.driver.set_window_size(1280, 900)
