"""The check of Redis before clients are admitted."""

import pytest
import redis as redis_py

from redpoll.cluster.redis.check import examine
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link


@pytest.fixture
def admin(own_redis):
    with redis_py.Redis(unix_socket_path=own_redis.path) as client:
        # As the embedded Redis has it (embedded.py).
        client.config_set("client-output-buffer-limit", "pubsub 256mb 64mb 60")
        yield client


async def linked(url: str) -> Link:
    link = Link(url)
    link.start()
    await link.wait_up()
    return link


async def test_plain_redis_passes_and_the_check_leaves_no_key(own_redis, admin):
    link = await linked(own_redis.url)
    assert await examine(link, Keys()) == ([], [])
    await link.close()
    # -1 is a key that stays. What the scan found may expire before it is looked at.
    assert all(-1 != admin.pttl(key) <= 1000 for key in admin.scan_iter())


async def test_a_redis_that_evicts_is_warned_of(own_redis, admin):
    admin.config_set("maxmemory-policy", "allkeys-lru")
    link = await linked(own_redis.url)
    faults, warnings = await examine(link, Keys())
    assert not faults
    assert "allkeys-lru" in warnings[0]
    assert "noeviction" in warnings[0]
    await link.close()


@pytest.mark.parametrize(
    ("limit", "suffices"),
    [("32mb 8mb 60", False), ("256mb 8mb 60", False), ("0 0 0", True), ("1gb 0 0", True), ("256mb 64mb 60", True)],
)
async def test_small_output_buffers_of_subscribed_connections_are_warned_of(own_redis, admin, limit, suffices):
    admin.config_set("client-output-buffer-limit", f"pubsub {limit}")
    link = await linked(own_redis.url)
    faults, warnings = await examine(link, Keys())
    assert (faults, len(warnings)) == ([], 0 if suffices else 1)
    assert suffices or "pubsub 256mb 64mb 60" in warnings[0]
    await link.close()


@pytest.mark.parametrize(
    ("rules", "lacking"),
    [(["~other:*", "&*"], "SET"), (["~rp:*", "resetchannels", "&other:*"], "PUBLISH")],
)
async def test_missing_acl_right_is_a_fault_that_names_the_rules(own_redis, admin, rules, lacking):
    admin.execute_command("ACL", "SETUSER", "poor", "on", ">pass", *rules, "+@all")
    link = await linked(own_redis.url + "?username=poor&password=pass")
    faults, _warnings = await examine(link, Keys())
    assert len(faults) == 1
    assert lacking in faults[0]
    assert "~rp:* &rp:*" in faults[0]
    await link.close()


async def test_checks_that_the_acl_forbids_are_skipped(own_redis, admin):
    admin.execute_command("ACL", "SETUSER", "plain", "on", ">pass", "~rp:*", "&rp:*", "+@all", "-config", "-info")
    link = await linked(own_redis.url + "?username=plain&password=pass")
    assert await examine(link, Keys()) == ([], [])
    await link.close()
