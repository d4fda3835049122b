"""Which master has which shard, as the nodes of a real Cluster say."""

import pytest

from helpers.sentinel import redis_cluster
from redpoll.cluster.redis.keys import SHARDS
from redpoll.cluster.redis.slot_map import SlotMap
from redpoll.config.redis_url import RedisUrl


@pytest.fixture(scope="module")
def cluster():
    # A node that stops for a moment isn't replaced.
    with redis_cluster(node_timeout_ms=60_000) as cluster:
        yield cluster


def map_of(url: str) -> SlotMap:
    """Nodes have a minute to answer, on the slowest machine."""
    return SlotMap(RedisUrl.parse(url), answer_within_s=60.0)


async def test_map_names_the_master_of_each_shard(cluster):
    slots = map_of(cluster.url)
    masters = await slots.read()
    assert len(masters) == SHARDS
    # Shards are in the order of their slots, and the masters have equal shares.
    assert sorted(masters.count(("127.0.0.1", node.port)) for node in cluster.nodes[:3]) == [21, 21, 22]
    assert masters == tuple(sorted(masters, key=masters.index))
    await slots.close()


async def test_one_node_in_the_url_suffices_but_two_nodes_must_agree(cluster):
    one = map_of(f"redis+cluster://127.0.0.1:{cluster.nodes[3].port}")
    assert len(await one.read()) == SHARDS
    assert len(one.nodes) >= 4
    await one.close()
    alone = map_of(f"redis+cluster://127.0.0.1:{cluster.nodes[0].port},127.0.0.1:1")
    # The second host isn't a node of this cluster, so only one answers. Then the answer names the others.
    with pytest.raises(OSError, match="agree"):
        await alone.read()
    assert len(await alone.read()) == SHARDS
    await alone.close()


async def test_node_counts_once_however_many_names_it_has(cluster):
    """Cut off together with us, a node agreed with itself, and its shards went on as if nothing had happened."""
    port = cluster.nodes[0].port
    slots = map_of(f"redis+cluster://localhost:{port},127.0.0.1:{port}")
    masters, ask = await slots.read(), slots._ask
    # The first answers, of one node, named the others.
    assert {("localhost", port), ("127.0.0.1", port)} < slots.nodes

    async def cut_off_with_one(node):
        if node[1] != port:
            raise OSError("cut off")
        return await ask(node)

    slots._ask = cut_off_with_one
    with pytest.raises(OSError, match="agree"):
        await slots.read()
    slots._ask = ask
    assert await slots.read() == masters
    await slots.close()


async def test_map_is_read_where_the_acl_keeps_the_ids_of_the_nodes_from_us(cluster):
    rights = ["on", ">pw", "+cluster|info", "+cluster|slots", "+@connection"]
    for node in cluster.nodes:
        with node.client() as client:
            client.execute_command("ACL", "SETUSER", "reader", *rights)
    login = "redis+cluster://reader:pw@"
    slots = map_of(cluster.url.replace("redis+cluster://", login))
    assert len(await slots.read()) == SHARDS
    await slots.close()


async def test_nodes_that_the_cluster_no_longer_has_are_forgotten(cluster):
    slots = map_of(cluster.url)
    # It was a node of this cluster once. Now its address may be another cluster's.
    stranger = ("127.0.0.1", 1)
    slots.nodes.add(stranger)
    masters = await slots.read()
    assert stranger not in slots.nodes | slots._clients.keys()
    assert set(masters) <= slots.nodes
    assert await slots.read() == masters
    await slots.close()


def test_nodes_have_the_credentials_and_files_of_the_url():
    slots = SlotMap(RedisUrl.parse("rediss+cluster://us%40r:p%3Aw@a,b?ssl_ca_certs=/ca.pem"))
    node = RedisUrl.parse(slots.url_of(("::1", 7)))
    assert (node.hosts, node.username, node.password) == ((("::1", 7),), "us@r", "p:w")
    assert (node.tls, node.ca_file, node.cluster) == (True, "/ca.pem", False)
