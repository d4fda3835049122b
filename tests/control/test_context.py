"""What a command works on, with a server and without."""

import pytest

from redpoll.control.context import Cluster, CommandError, Context
from redpoll.settings import Settings


def test_what_needs_a_server_says_so_where_none_runs():
    context = Context(None, None, Settings())
    with pytest.raises(CommandError, match=r"^clearing a history needs a running server, and none runs on this data"):
        context.running("clearing a history")


def test_beside_a_server_there_is_its_cluster():
    cluster = Cluster(None, None, None)
    assert Context(None, None, Settings(), cluster=cluster).running("anything") is cluster
