"""Which nodes are dead and which one leads: by tables of heartbeats, and by the script `lead` on a real Redis."""

import msgspec
import pytest

from helpers.known_nodes import known
from redpoll.cluster.lifecycle import Lifecycle
from redpoll.cluster.nodes import Leader, Node, Nodes, NodesView, Unchanged, entries_of, lead_call
from redpoll.cluster.redis.scripts import LEAD

ME, OTHER = "aaaaaaaaaaaa", "bbbbbbbbbbbb"


def node(name: str = "one", *, store: str = "s", started: float = 100.0, beat: int = 1, **changed: object) -> Node:
    fields = {"version": "1", "workers": (1, 2), "greatest": 2, "control": True, **changed}
    return Node(name=name, store=store, started=started, beat=beat, **fields)


def entry(beat: int, name: str = "one", **changed: object) -> bytes:
    return msgspec.json.encode(node(name, beat=beat, **changed))


# Tables of heartbeats


def test_value_counts_the_reads_over_which_it_stayed_the_same():
    unchanged = Unchanged(gap_s=2.0)
    for now in range(4):
        unchanged.read({"a": b"1", "b": b"%d" % now}, float(now))
    assert (unchanged.reads("a"), unchanged.reads("b"), unchanged.reads("c")) == (3, 0, 0)


def test_pause_of_the_reader_restarts_the_count():
    unchanged = Unchanged(gap_s=2.0)
    for now in (0.0, 1.0, 3.5):
        unchanged.read({"a": b"1"}, now)
    assert unchanged.reads("a") == 0
    unchanged.read({"a": b"1"}, 4.5)
    assert unchanged.reads("a") == 1


def test_reads_in_quick_succession_count_once():
    unchanged = Unchanged(gap_s=2.0, min_pause_s=0.8)
    for now in (0.0, 0.1, 0.2, 1.0, 1.1):
        unchanged.read({"a": b"1"}, now)
    assert unchanged.reads("a") == 1


def test_node_whose_entry_stays_the_same_over_four_further_reads_is_dead_and_never_the_reader():
    nodes = Nodes(ME)
    for now in range(5):
        assert nodes.dead == set()
        nodes.read(b"", {ME: entry(1), OTHER: entry(1)}, float(now))
    assert nodes.dead == {OTHER}
    nodes.read(b"", {ME: entry(1), OTHER: entry(2)}, 5.0)
    assert nodes.dead == set()


def test_dead_node_that_writes_nothing_stays_dead_after_a_pause_of_the_reader():
    """A fail-over of Redis is such a pause. Publishes waited for that node's workers once more."""
    nodes = Nodes(ME)
    for now in range(5):
        nodes.read(b"", {ME: entry(1), OTHER: entry(1)}, float(now))
    nodes.read(b"", {ME: entry(2), OTHER: entry(1)}, 60.0)
    assert nodes.dead == {OTHER}
    nodes.read(b"", {ME: entry(3), OTHER: entry(2)}, 61.0)
    assert nodes.dead == set()


def test_what_is_found_in_an_own_redis_is_dead_until_it_changes():
    """Members of a killed server were listed beside those who had come back, until four reads had passed."""
    nodes, later = Nodes(ME, alone=True), "c" * 12
    leader, found = f"{OTHER} 7 1".encode(), entry(1, "an earlier name", started=900.0)
    nodes.read(leader, {ME: entry(1), OTHER: found}, 0.0)
    assert nodes.dead == {OTHER}
    assert nodes.replaceable("one", 200.0) == leader.decode()
    nodes.read(leader, {ME: entry(2), OTHER: found, later: entry(1)}, 1.0)
    assert nodes.dead == {OTHER}
    nodes.read(leader, {ME: entry(3), OTHER: entry(2), later: entry(2)}, 2.0)
    assert nodes.dead == set()


def test_nodes_that_redis_lost_are_alive_until_four_further_reads_do_not_show_them():
    nodes, third = Nodes(ME), "c" * 12
    for beat in (1, 2):
        nodes.read(b"", {ME: entry(beat), OTHER: entry(beat), third: entry(beat)}, float(beat))
    nodes.read(b"", {ME: entry(3)}, 3.0, lost=True)
    assert (set(nodes.by_run), nodes.dead) == ({ME, OTHER, third}, set())
    for now in range(4, 7):
        nodes.read(b"", {ME: entry(now), third: entry(now)}, float(now))
    assert nodes.dead == {OTHER}
    # Those that end in order are gone at once.
    nodes.read(b"", {ME: entry(7)}, 7.0)
    assert (set(nodes.by_run), nodes.dead) == ({ME}, set())


def test_unreadable_entry_hides_no_other_node():
    nodes = Nodes(ME)
    nodes.read(b"", {ME: entry(1), OTHER: b"{"}, 0.0)
    assert list(nodes.by_run) == [ME]


def test_nodes_with_another_store_are_listed_until_they_are_dead():
    nodes = Nodes(ME)
    table = {OTHER: entry(1, store="t"), "c" * 12: entry(1, store="s"), "d" * 12: entry(1, store="u", started=50.0)}
    for now in range(5):
        nodes.read(b"", table, float(now))
        found = [run for run, _ in nodes.others("s")]
        assert found == (["d" * 12, OTHER] if now < 4 else [])


def test_leader_can_be_replaced_when_its_entry_stays_the_same_over_four_further_reads():
    nodes, now = Nodes(ME), 0.0
    for beat in (1, 2, 2, 2, 2):
        nodes.read(b"%s 7 %d" % (OTHER.encode(), beat), {OTHER: entry(beat, "two")}, now)
        assert nodes.replaceable("one", 200.0) == ""
        now += 1.0
    nodes.read(f"{OTHER} 7 2".encode(), {OTHER: entry(2, "two")}, now)
    assert nodes.replaceable("one", 200.0) == f"{OTHER} 7 2"
    assert nodes.greatest_term == 7


def test_earlier_run_of_the_same_node_can_be_replaced_at_once():
    nodes = Nodes(ME)
    nodes.read(f"{OTHER} 7 2".encode(), {OTHER: entry(2, "one", started=100.0)}, 0.0)
    assert nodes.replaceable("one", 200.0) == f"{OTHER} 7 2"
    assert nodes.replaceable("two", 200.0) == ""
    # The other one is the later run: two live nodes with one name don't take turns.
    assert nodes.replaceable("one", 50.0) == ""


def test_live_node_with_the_same_name_cannot_be_replaced():
    nodes = Nodes(ME)
    for beat in (2, 3):
        nodes.read(b"%s 7 %d" % (OTHER.encode(), beat), {OTHER: entry(beat, "one", started=100.0)}, float(beat))
    assert nodes.replaceable("one", 200.0) == ""
    assert nodes.namesakes("one") == [OTHER]


def test_nobody_and_the_reader_itself_are_not_replaced():
    nodes = Nodes(ME)
    for now in range(6):
        nodes.read(b"- 7 0", {}, float(now))
    assert nodes.replaceable("one", 200.0) == ""
    for now in range(6, 12):
        nodes.read(f"{ME} 7 1".encode(), {}, float(now))
    assert nodes.replaceable("one", 200.0) == ""


# The script


@pytest.fixture
def lead(link, keys):
    """`await lead(run, …)`: a heartbeat; returns the status, the leader, and the entries by run."""

    async def call(run=ME, who=None, *, ends=False, may_lead=True, replaces="", seen_term=0, dead=()):
        made = lead_call(
            keys,
            run,
            None if ends else who or node(),
            may_lead=may_lead,
            replaces=replaces,
            seen_term=seen_term,
            dead=dead,
        )
        status, leader, flat, _, _ = await link.execute(LEAD, *made)
        return status.decode(), Leader.parse(leader), entries_of(flat)

    return call


async def test_first_node_leads_and_its_heartbeats_renew_the_term(lead):
    assert (await lead())[1] == (ME, 1, f"{ME} 1 1")
    status, leader, entries = await lead(ME, node(beat=2))
    assert (status, leader.text, list(entries)) == ("OK", f"{ME} 1 2", [ME])


async def test_second_node_leads_only_by_replacing_exactly_the_entry_that_it_read(lead):
    await lead(ME)
    assert (await lead(OTHER))[1].run == ME
    # The leader has beaten since.
    await lead(ME)
    assert (await lead(OTHER, replaces=f"{ME} 1 1"))[1].run == ME
    assert (await lead(OTHER, replaces=f"{ME} 1 2"))[1].text == f"{OTHER} 2 1"
    # The replaced one learns it from its next heartbeat.
    assert (await lead(ME))[1].run == OTHER


async def test_node_that_may_not_lead_does_not(lead):
    assert (await lead(may_lead=False))[1].text == ""
    assert (await lead(OTHER))[1].run == OTHER


async def test_leader_that_ends_is_followed_at_once_with_the_next_term(lead):
    await lead(ME)
    await lead(OTHER)
    assert (await lead(ME, ends=True))[1].text == "- 1 0"
    _, leader, entries = await lead(OTHER)
    assert (leader.text, list(entries)) == (f"{OTHER} 2 1", [OTHER])


async def test_end_of_another_node_leaves_the_leader(lead):
    await lead(ME)
    await lead(OTHER)
    assert (await lead(OTHER, ends=True))[1].run == ME


async def test_terms_do_not_repeat_after_redis_lost_its_data(lead):
    assert (await lead(seen_term=41))[1].term == 42
    # It has this term itself.
    assert (await lead(seen_term=42))[1].term == 42
    # The record store has seen a greater one than Redis gave.
    assert (await lead(seen_term=43))[1].term == 44
    assert (await lead(seen_term=7))[1].term == 44


async def test_node_with_another_store_is_refused_unless_the_others_are_dead(lead, link, keys):
    await lead(ME)
    status, leader, entries = await lead(OTHER, node(store="t"))
    assert (status, leader.run, list(entries)) == ("REFUSED", ME, [ME])
    status, leader, entries = await lead(OTHER, node(store="t"), dead=(ME,))
    assert (status, set(entries)) == ("OK", {ME, OTHER})


async def test_node_that_is_listed_already_is_not_compared_again(lead):
    await lead(ME)
    await lead(OTHER, node(store="t"), dead=(ME,))
    assert (await lead(ME))[0] == "OK"


def test_view_of_control_tells_live_nodes_from_dead_ones_and_finds_the_later_of_one_name():
    view = NodesView("1")
    assert (view.known, view.several, view.live_run("a")) == (False, False, None)
    view.update([known("1", "a"), known("2", "b", alive=False)], "1")
    assert (view.known, view.several, set(view.others)) == (True, False, {"2"})
    drained = known("4", "b", started=2.0, lifecycle=Lifecycle.EVACUATING)
    view.update(
        [known("1", "a"), known("2", "b", alive=False, started=9.0), known("3", "b", started=1.0), drained], "3"
    )
    assert (view.several, view.leader, view.live_run("b")) == (True, "3", "4")
    assert view.serving() == {"1": 1_000, "3": 1_000}
