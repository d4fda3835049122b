"""`redpoll node` against a server."""

import json
import socket
import time

import pytest

import redpoll


def test_single_node_is_listed_and_leads(typed, server, wait_until_true):
    where = ("--data-dir", str(server.folder / "data"))
    row = {}

    def is_well() -> bool:
        listed = typed("node", "list", "--json", *where)
        if listed.exit_code != 0:
            return False
        (shown,) = json.loads(listed.stdout)
        row.update(shown)
        return (row["fitness"], row["leader"], row["alive"]) == ("fit", True, True)

    # It isn't while a report of its control plane is late.
    wait_until_true(is_well)
    assert row.keys() == {
        *("name", "version", "up_since", "workers", "connections", "leader", "draining", "alive", "fitness")
    }
    assert (row["name"], row["version"]) == (socket.gethostname(), redpoll.__version__)
    assert (row["workers"], row["draining"]) == (server.workers, False)
    assert 0 < row["up_since"] < time.time()
    line = f"{socket.gethostname()}  alive, leader  {server.workers} workers  "
    wait_until_true(lambda: typed("node", "list", *where).stdout.startswith(line))


def test_node_is_drained_and_serves_again(typed, server, wait_until_true):
    where = ("--data-dir", str(server.folder / "data"))
    name = socket.gethostname()

    def draining() -> bool:
        (row,) = json.loads(typed("node", "list", "--json", *where).stdout)
        return row["draining"]

    assert typed("node", "drain", name, "--within", "1", *where).stdout.startswith(f"draining {name}")
    wait_until_true(draining)
    assert json.loads(typed("node", "undrain", name, "--json", *where).stdout) == {"name": name, "draining": False}
    wait_until_true(lambda: not draining())
    missing = typed("node", "drain", "nowhere", *where)
    assert (missing.exit_code, "no live node with the name nowhere" in missing.stderr) == (1, True)


def test_balance_of_a_server_without_connections_closes_nothing(typed, server):
    where = ("--data-dir", str(server.folder / "data"))
    assert typed("balance", *where).stdout == "no node has more than 5 % above the mean; nothing is closed\n"
    assert json.loads(typed("balance", "--within", "5", "--json", *where).stdout) == {"moved": 0, "within_s": 5.0}


@pytest.mark.parametrize(
    ("fitness", "state"), [("fit", "alive"), ("no record store", "alive, no record store"), ("unfit", "alive, unfit")]
)
def test_node_that_can_not_do_the_leaders_work_is_marked(typed, answering, fitness, state):
    row = {"name": "a", "version": "1", "up_since": 5.0, "workers": 1, "connections": 0, "leader": False}
    answering([{**row, "draining": False, "alive": True, "fitness": fitness}])
    assert typed("node", "list").stdout.startswith(f"a  {state}  1 workers")


def test_without_a_server_there_is_no_list(typed, app_id):
    result = typed("node", "list")
    assert (result.exit_code, "needs a running server" in result.stderr) == (1, True)
