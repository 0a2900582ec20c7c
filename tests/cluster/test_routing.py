"""Where operations run."""

from headrace.cluster.routing import JOINED
from headrace.operations.catalog import OPERATIONS


def test_answers_of_all_nodes_can_be_joined() -> None:
    """An operation that every node carries out says how its answers become one, and no other one does."""
    every = {each.method for each in OPERATIONS.values() if each.runs == "every node"}
    assert every - {"send_reply", "cluster_status"} == set(JOINED)
