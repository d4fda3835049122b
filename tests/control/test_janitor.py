"""Periodic work: the directory in a real Redis is kept up to date, and a hanging Redis is noticed."""

import asyncio

import pytest

from redpoll.cluster.directory import DirectoryVersion, DirectoryWriter
from redpoll.cluster.lifecycle import Life
from redpoll.cluster.redis.keys import SHARDS, Keys
from redpoll.cluster.redis.link import Link, LinkDown
from redpoll.control.janitor import ControlJanitor
from redpoll.control.observe.health import Health
from redpoll.protocol.apps import App, Key
from redpoll.store.errors import StoreUnavailable


class Records:
    def __init__(self):
        self.directory = DirectoryVersion(7, "seven")
        self.apps = {"1": App(id="1", name="one", keys=(Key(key="k", secret="s"),))}
        # What `sync` finds: another control plane's version, or an error.
        self.stored: int | Exception | None = None

    async def sync(self):
        if isinstance(self.stored, Exception):
            raise self.stored
        before = self.directory
        if self.stored is not None:
            self.directory = DirectoryVersion(self.stored)
        return self.directory != before


@pytest.fixture
async def link(redis):
    link = Link(redis.url)
    yield link
    await link.close()


@pytest.fixture
async def parts(link):
    """(janitor, records, health, writer), not started."""
    records = Records()
    writer = DirectoryWriter(link, Keys("rp"))
    health = Health(Life(), lambda: True)
    janitor = ControlJanitor(link, writer, records, health)
    link.on_up = janitor.link_up
    yield janitor, records, health, writer
    janitor.stop()


async def test_directory_is_written_when_redis_connects(parts, link, wait_until):
    janitor, _records, health, writer = parts
    janitor.start()
    assert not janitor.redis_answers()
    link.start()
    await wait_until(lambda: health.directory_written)
    assert await writer.version() == (7, "seven")
    assert b"one" in await link.ask(b"HGET", Keys("rp").directory, "1")
    assert janitor.redis_answers()


async def test_lost_directory_is_written_again(parts, link, wait_until):
    janitor, _records, health, writer = parts
    janitor.start()
    link.start()
    await wait_until(lambda: health.directory_written)
    await link.ask(b"FLUSHALL")
    found = None
    async with asyncio.timeout(60):
        while found != (7, "seven"):
            found = await writer.version()
    assert b"one" in await link.ask(b"HGET", Keys("rp").directory, "1")


async def test_directory_whose_records_are_lost_is_written_again(parts, link, wait_until):
    janitor, _records, health, writer = parts
    janitor.start()
    link.start()
    await wait_until(lambda: health.directory_written)
    # As an eviction does. The version stays. Both leave in one write, before a check of the janitor.
    _, version = await asyncio.gather(link.ask(b"DEL", Keys("rp").directory), writer.version())
    assert version is None
    async with asyncio.timeout(60):
        while await writer.version() is None:
            await asyncio.sleep(0.01)
    assert b"one" in await link.ask(b"HGET", Keys("rp").directory, "1")


async def test_changed_record_is_written_at_once(parts, link, wait_until):
    janitor, records, health, writer = parts
    janitor.start()
    link.start()
    await wait_until(lambda: health.directory_written)
    # A check at this moment would write the whole directory, with the app of `records`.
    janitor.stop()
    before, records.directory = records.directory, DirectoryVersion(8, "eight")
    await janitor.record_changed("1", App(id="1", name="renamed", keys=()), before, records.directory)
    assert await writer.version() == (8, "eight")
    assert b"renamed" in await link.ask(b"HGET", Keys("rp").directory, "1")


async def test_change_without_redis_succeeds_and_is_written_later(parts, link, wait_until):
    janitor, records, health, writer = parts
    before, records.directory = records.directory, DirectoryVersion(8, "eight")
    await janitor.record_changed("1", records.apps["1"], before, records.directory)
    janitor.start()
    link.start()
    await wait_until(lambda: health.directory_written)
    assert await writer.version() == (8, "eight")


async def test_change_after_one_that_redis_lacks_makes_the_whole_directory_be_written(parts, link, wait_until):
    janitor, records, health, writer = parts
    janitor.start()
    link.start()
    await wait_until(lambda: health.directory_written)
    records.directory = DirectoryVersion(9, "nine")
    records.apps["2"] = App(id="2", name="two", keys=())
    await janitor.record_changed("1", records.apps["1"], DirectoryVersion(8, "eight"), records.directory)
    found = None
    async with asyncio.timeout(60):
        while found != (9, "nine"):
            found = await writer.version()
    assert sorted(await link.ask(b"HKEYS", Keys("rp").directory)) == [b"1", b"2"]


async def test_directory_of_another_control_plane_is_not_replaced_by_older_records(parts, link, wait_until):
    janitor, records, health, writer = parts
    janitor.start()
    link.start()
    await wait_until(lambda: health.directory_written)
    # Only the checks below: while two write the directory, it has no version at times.
    janitor.stop()
    records.stored = StoreUnavailable("away")
    assert await writer.put("1", App(id="1", name="newer", keys=()), 8, before="seven")
    await janitor._compare()
    assert (records.directory.number, await writer.version()) == (7, (8, "-"))
    records.stored = 8
    await janitor._compare()
    assert b"newer" in await link.ask(b"HGET", Keys("rp").directory, "1")
    records.stored = StoreUnavailable("away")
    await link.ask(b"DEL", Keys("rp").directory_version)
    await janitor._compare()
    assert await writer.version() == (8, "-")


class Hanging:
    """A link to a Redis that takes commands and never answers."""

    def __init__(self):
        self.usable = set(range(SHARDS))
        self.dropped = []
        self.waiting = []

    def is_usable(self, shard):
        return shard in self.usable

    def drop_connection(self, shard, reason):
        self.dropped.append(shard)
        for future in self.waiting:
            future.set_exception(LinkDown(sent=True))

    async def version(self):
        future = asyncio.get_running_loop().create_future()
        self.waiting.append(future)
        return await future


async def test_hanging_redis_counts_as_away_after_5_s_and_is_dropped_after_10_s():
    now = 100.0
    link = Hanging()
    janitor = ControlJanitor(link, link, Records(), Health(Life(), lambda: True), clock=lambda: now)
    janitor.link_up()
    await asyncio.sleep(0)
    assert janitor.redis_answers()
    now = 105.0
    assert not janitor.redis_answers()
    janitor._look()
    assert link.dropped == []
    now = 110.5
    janitor._look()
    # Those to the other masters of a Cluster stay.
    assert link.dropped == [0]
    await asyncio.sleep(0)
    janitor.stop()


async def test_redis_answers_while_another_master_of_a_cluster_than_that_of_the_directory_is_lost():
    """All nodes lose it together. Not ready, all of them left the load balancer, though most channels worked."""
    now = 100.0
    link = Hanging()
    janitor = ControlJanitor(
        link, link, Records(), Health(Life(), lambda: True), leader=lambda: None, clock=lambda: now
    )
    janitor.link_up()
    await asyncio.sleep(0)
    link.waiting.pop().set_result(DirectoryVersion(7, "seven"))
    await janitor._asking
    link.usable = {0, 5}
    now = 104.0
    janitor._look()
    await asyncio.sleep(0)
    now = 108.0
    assert not janitor.redis_answers()
    link.waiting.pop().set_result(DirectoryVersion(7, "seven"))
    await janitor._asking
    assert janitor.redis_answers()
    link.usable = {5}
    assert not janitor.redis_answers()
    janitor.stop()


async def test_redis_that_answers_again_is_reported_at_once():
    """The next report of the control plane's fitness comes up to a second later, and then the lead may have moved."""
    now, backs = 100.0, []
    link = Hanging()
    parts = (link, link, Records(), Health(Life(), lambda: True))

    def back() -> None:
        backs.append(janitor.redis_answers())

    janitor = ControlJanitor(*parts, leader=lambda: None, on_redis_back=back, clock=lambda: now)
    janitor.link_up()
    await asyncio.sleep(0)
    now = 104.0
    link.waiting.pop().set_result(DirectoryVersion(7, "seven"))
    await janitor._asking
    assert backs == []
    janitor.check_now()
    await asyncio.sleep(0)
    now = 110.0
    assert not janitor.redis_answers()
    link.waiting.pop().set_result(DirectoryVersion(7, "seven"))
    await janitor._asking
    assert backs == [True]
    janitor.stop()
