"""The page of the nodes."""

import re

from redpoll.cluster.lifecycle import Lifecycle
from redpoll.ipc.messages import NodesChanged


async def test_nodes_are_shown_with_their_state(plane, browser, node):
    here = node("0123456789ab", "here", workers=[1, 2], started=1_700_000_000.0)
    others = [node("1" * 12, "gone", alive=False), node("2" * 12, "leaving<", lifecycle=Lifecycle.DRAINING)]
    plane.plane.receive(NodesChanged([here, *others], "0123456789ab"))
    page = (await browser.get("/dashboard/nodes")).body.decode()
    rows = [re.sub(r"<[^>]+>|\s+", " ", row).split() for row in re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)[1:]]
    assert [(row[0], row[1]) for row in rows] == [("gone", "dead"), ("here", "alive"), ("leaving&lt;", "draining")]
    assert rows[1][1:4] == ["alive", "leader", "2"]
    assert 'datetime="2023-11-14T22:13:20' in page


async def test_page_without_nodes_says_why(plane, browser):
    plane.plane.receive(NodesChanged([], None))
    assert "No nodes yet" in (await browser.get("/dashboard/nodes")).body.decode()
