"""The check of Redis before clients are admitted."""

import pytest
import redis as redis_py

from redpoll.cluster.keys import Keys
from redpoll.cluster.link import Link
from redpoll.cluster.redis_check import examine


@pytest.fixture
def admin(own_redis):
    with redis_py.Redis(unix_socket_path=own_redis.path) as client:
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
    assert all(0 < admin.pttl(key) <= 1000 for key in admin.scan_iter())


async def test_a_redis_that_evicts_is_warned_of(own_redis, admin):
    admin.config_set("maxmemory-policy", "allkeys-lru")
    link = await linked(own_redis.url)
    faults, warnings = await examine(link, Keys())
    assert not faults
    assert "allkeys-lru" in warnings[0]
    assert "noeviction" in warnings[0]
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


async def test_what_may_not_be_asked_is_passed_over(own_redis, admin):
    admin.execute_command("ACL", "SETUSER", "plain", "on", ">pass", "~rp:*", "&rp:*", "+@all", "-config", "-info")
    link = await linked(own_redis.url + "?username=plain&password=pass")
    assert await examine(link, Keys()) == ([], [])
    await link.close()
