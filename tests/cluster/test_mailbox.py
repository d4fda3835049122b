import asyncio

import pytest

from helpers.sentinel import redis_cluster
from redpoll.cluster.mailbox import Mailbox
from redpoll.cluster.redis.cluster_link import ClusterLink
from redpoll.cluster.redis.keys import Keys, shard_of_name
from redpoll.cluster.redis.link import Link


@pytest.fixture
async def link(redis):
    link = Link(redis.url)
    yield link
    await link.close()


def mailbox(link: Link | ClusterLink, k: int = 1):
    """A mailbox, and what came to it and happened to it."""
    seen: list[object] = []
    box = Mailbox(link, Keys(sharded=link.sharded), "0123456789ab", k)
    box.start(seen.append, lambda: seen.append("up"), lambda: seen.append("lost"))
    return box, seen


def up(link: Link | ClusterLink, *boxes: Mailbox) -> None:
    link.start(
        on_up=lambda: [box.connected() for box in boxes],
        on_down=lambda reason: [box.connection_lost() for box in boxes],
        on_push=lambda topic, payload: [box.topics[topic](payload) for box in boxes if topic in box.topics],
    )


async def outcome(ask, *args) -> bool:
    done = asyncio.get_running_loop().create_future()
    ask(*args, done.set_result)
    return await done


async def test_messages_arrive_in_order_and_the_sender_knows(link):
    box, seen = mailbox(link)
    other, others = mailbox(link, 2)
    up(link, box, other)
    await link.wait_up()
    assert [await outcome(other.send, box.address, b"%d" % number) for number in range(3)] == [True] * 3
    assert seen == ["up", b"0", b"1", b"2"]
    assert others == ["up"]


async def test_message_to_a_worker_that_is_gone_does_not_arrive(link):
    box, _ = mailbox(link)
    up(link, box)
    await link.wait_up()
    assert await outcome(box.are_there, box.address) is True
    assert await outcome(box.send, "0123456789ab.99", b"x") is False
    assert await outcome(box.are_there, "0123456789ab.99") is False


async def test_worker_is_found_on_whichever_master_of_a_cluster_it_reads():
    with redis_cluster(replicated=False, node_timeout_ms=60_000) as cluster:
        link = ClusterLink(cluster.url, connected_within_s=60.0)
        boxes = [mailbox(link, k)[0] for k in range(16)]
        up(link, *boxes)
        await link.wait_up()
        shards = {shard_of_name(topic) for box in boxes for topic in box.topics}
        assert len({link.masters[at] for at in shards}) > 1
        assert [await outcome(boxes[0].are_there, box.address) for box in boxes] == [True] * len(boxes)
        assert await outcome(boxes[0].are_there, "0123456789ab.99") is False
        await link.close()


async def test_break_of_the_link_is_reported_and_nothing_arrives_meanwhile(link):
    box, seen = mailbox(link)
    up(link, box)
    await link.wait_up()
    link.drop("the test breaks it")
    assert not box.up
    assert await outcome(box.send, box.address, b"x") is False
    # Nobody is given up for lost while Redis can't say.
    assert await outcome(box.are_there, "0123456789ab.99") is True
    await link.wait_up()
    assert seen == ["up", "lost", "up"]
    assert await outcome(box.send, box.address, b"y") is True
    assert seen[-1] == b"y"
