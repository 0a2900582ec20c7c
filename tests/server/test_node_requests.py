"""What only nodes of a cluster may ask."""

from contextlib import closing

import pytest

from headrace.errors import Closed, Unauthenticated
from headrace.testing import running_server
from headrace.wire.binary import Type
from tests.contract.raw_binary import FrameSocket


@pytest.mark.parametrize("token", [None, "a-long-enough-token"])
def test_a_stranger_is_no_node(token: str | None) -> None:
    """Its login is counted as a failed one, and ends the connection, whether or not there is a cluster."""
    with running_server(memory=True, token=token) as server:
        with closing(FrameSocket(server.address)) as stranger:
            with pytest.raises(Unauthenticated):
                stranger.ask(Type.AUTH, {"node": "node1:9999", "secret": "guessed"})
            with pytest.raises((OSError, Closed)):
                stranger.ask(Type.HEARTBEAT, {})
        assert server.call(lambda: server.server.hub.logins.failed) == 1
