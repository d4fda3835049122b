"""How many connections each worker closes to even out the load."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redpoll.control.nodes.balance import plan

A, B, C = "a" * 12, "b" * 12, "c" * 12


def test_nodes_above_the_mean_close_what_is_above_it_from_their_fullest_workers():
    connections = {f"{A}.1.0": 500, f"{A}.2.0": 400, f"{A}.3.0": 100, f"{B}.1.0": 800, f"{C}.1.0": 0}
    assert plan(connections, frozenset({A, B, C})) == {f"{A}.1.0": 250, f"{A}.2.0": 150, f"{B}.1.0": 200}


def test_new_node_that_has_no_worker_yet_counts():
    assert plan({f"{A}.1.0": 100}, frozenset({A, B})) == {f"{A}.1.0": 50}


def test_within_five_percent_nothing_is_closed():
    assert plan({f"{A}.1.0": 105, f"{B}.1.0": 95}, frozenset({A, B})) == {}
    assert plan({}, frozenset({A})) == {}
    assert plan({}, frozenset()) == {}


def test_workers_of_a_single_node_are_evened_out():
    connections = {f"{A}.1.0": 130, f"{A}.2.0": 100, f"{A}.3.0": 70}
    assert plan(connections, frozenset({A})) == {f"{A}.1.0": 30}
    # With several nodes they stay: the load balancer doesn't send clients back to the same node.
    assert plan({**connections, f"{B}.1.0": 300}, frozenset({A, B})) == {}


def test_draining_node_and_its_connections_do_not_count():
    assert plan({f"{A}.1.0": 100, f"{B}.1.0": 100, f"{C}.1.0": 900}, frozenset({A, B})) == {}


@given(
    st.lists(st.lists(st.integers(0, 2_000), min_size=1, max_size=5), min_size=2, max_size=5),
)
def test_what_is_left_is_at_most_the_mean_and_no_worker_closes_more_than_it_has(sizes):
    runs = [f"{number:012d}" for number in range(len(sizes))]
    connections = {
        f"{run}.{k}.0": size for run, workers in zip(runs, sizes, strict=True) for k, size in enumerate(workers)
    }
    targets = plan(connections, frozenset(runs))
    mean = sum(connections.values()) / len(runs)
    for run in runs:
        before = {w: n for w, n in connections.items() if w.startswith(run)}
        after = {w: n - targets.get(w, 0) for w, n in before.items()}
        assert all(0 <= after[w] <= before[w] for w in before)
        if sum(before.values()) > 1.05 * mean:
            assert sum(after.values()) == pytest.approx(mean, abs=1)
            lowered = [after[w] for w in before if after[w] < before[w]]
            assert max(after.values()) - min(lowered) <= 1
        else:
            assert after == before
