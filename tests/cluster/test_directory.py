import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from redpoll.cluster import directory
from redpoll.cluster.directory import Directory, DirectoryChanged, DirectoryWriter, read_apps, read_directory
from redpoll.protocol.apps import App, Key


def app(number: int, *, name: str = "x", enabled: bool = True, key_enabled: bool = True) -> App:
    keys = (Key(key=f"key{number}", secret="5ec", enabled=key_enabled),)
    return App(id=str(number), name=name, keys=keys, enabled=enabled)


@pytest.fixture
def writer(link, keys):
    return DirectoryWriter(link, keys)


@pytest.fixture
async def worker(start_worker, writer):
    await writer.fill([app(1)], 1)
    return await start_worker()


async def test_worker_reads_the_whole_directory_at_its_start(writer, start_worker, wait_until):
    await writer.fill([app(number) for number in range(1000)], 17)
    worker = await start_worker()
    await wait_until(lambda: worker.directory.complete)
    assert worker.directory.version == 17
    assert worker.directory.find("key999") == app(999)
    assert worker.directory.find("key1000") is None
    assert worker.registry.ready


async def test_worker_waits_for_a_missing_directory(writer, start_worker, wait_until):
    worker = await start_worker()
    assert not worker.registry.ready
    assert not worker.directory.complete
    await writer.fill([app(1)], 1)
    await wait_until(lambda: worker.registry.ready)


async def test_change_is_applied_and_reported_at_once(worker, writer, wait_until):
    await wait_until(lambda: worker.directory.complete)
    changes = []
    worker.directory.on_change = lambda *change: changes.append(change)
    await writer.put("2", app(2), 2)
    await writer.put("1", app(1, name="y"), 3)
    await writer.put("2", None, 4)
    await wait_until(lambda: worker.directory.version == 4)
    assert changes == [("2", None, app(2)), ("1", app(1), app(1, name="y")), ("2", app(2), None)]
    assert worker.directory.find("key2") is None
    assert set(worker.directory.by_id) == {"1"}


async def test_disabled_key_opens_nothing_and_disabled_app_is_found(worker, writer, wait_until):
    await wait_until(lambda: worker.directory.complete)
    await writer.put("1", app(1, key_enabled=False), 2)
    await wait_until(lambda: worker.directory.find("key1") is None)
    assert worker.directory.by_id["1"] == app(1, key_enabled=False)
    await writer.put("1", app(1, enabled=False), 3)
    await wait_until(lambda: worker.directory.find("key1") is not None)
    assert not worker.directory.find("key1").enabled


async def test_missed_change_is_found_by_the_next_beat(worker, writer, link, keys, wait_until):
    await wait_until(lambda: worker.directory.complete)
    link.call(b"HSET", keys.directory, "5", b'{"id":"5","name":"five","keys":[]}')
    await link.ask(b"SET", keys.directory_version, 9)
    await wait_until(lambda: worker.directory.version == 9)
    assert worker.directory.by_id["5"].name == "five"


async def test_skipped_version_makes_the_worker_read_everything(worker, writer, link, keys, wait_until):
    await wait_until(lambda: worker.directory.complete)
    # A change whose message the worker didn't get.
    await link.ask(b"HSET", keys.directory, "5", b'{"id":"5","name":"five","keys":[]}')
    await link.ask(b"SET", keys.directory_version, "2 2 -")
    assert await writer.put("2", app(2), 3)
    await wait_until(lambda: worker.directory.version == 3)
    assert set(worker.directory.by_id) == {"1", "2", "5"}


async def test_refill_deletes_removed_records_and_old_ones_are_used_until_then(worker, writer, link, keys, wait_until):
    await wait_until(lambda: worker.directory.complete)
    await link.ask(b"DEL", keys.directory, keys.directory_version)
    worker.directory.read()
    for _ in range(2):
        await worker.link.ask(b"PING")
    assert worker.directory.find("key1") == app(1)
    await writer.fill([app(2), app(3)], 1)
    assert (await writer.version()).number == 1
    await writer.fill([app(3)], 2)
    await wait_until(lambda: worker.directory.version == 2)
    assert set(worker.directory.by_id) == {"3"}
    assert worker.directory.find("key1") is None


class Passes:
    """Counts passes of the event loop, and how often a function is called in each."""

    def __init__(self) -> None:
        self.calls: Counter[int] = Counter()
        self._count = 0
        self._next()

    def _next(self) -> None:
        self._count += 1
        self._handle = asyncio.get_running_loop().call_soon(self._next)

    def counted(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any) -> Any:
            self.calls[self._count] += 1
            return work(*args)

        return count

    def stop(self) -> None:
        self._handle.cancel()


@pytest.fixture
async def passes():
    passes = Passes()
    yield passes
    passes.stop()


class TestParts:
    """Many records are written, read and adopted in parts: clients and publishes are served in between."""

    async def test_written(self, writer, passes, monkeypatch):
        encoder = SimpleNamespace(encode=passes.counted(directory._ENCODER.encode))
        monkeypatch.setattr(directory, "_ENCODER", encoder)
        await writer.fill([app(number) for number in range(2_000)], 1)
        assert passes.calls.total() == 2_000
        assert max(passes.calls.values()) == 200

    async def test_read(self, writer, link, keys, passes, monkeypatch):
        await writer.fill([app(number) for number in range(2_000)], 1)
        decoder = SimpleNamespace(decode=passes.counted(directory._DECODER.decode))
        monkeypatch.setattr(directory, "_DECODER", decoder)
        _, apps = await read_directory(link, keys)
        assert len(apps) == 2_000
        # Redis returns some more than were asked for.
        assert max(passes.calls.values()) < 400

    async def test_adopted(self, writer, link, keys, passes, wait_until, monkeypatch):
        # The clock says that each look comes after the end of the slice.
        monkeypatch.setattr("redpoll.loop.slices.monotonic", itertools.count().__next__)
        found = Directory(link, keys, on_change=passes.counted(lambda *change: None))
        for records in (range(200), range(200, 400)):
            await writer.fill([app(number) for number in records], records.stop)
            found.read()
            await wait_until(lambda stop=records.stop: found.version == stop)
        # The first ones, the others, and that the first are gone.
        assert passes.calls.total() == 600
        assert max(passes.calls.values()) == 20

    async def test_changed_while_they_are_adopted(self, writer, link, keys, wait_until, monkeypatch):
        # That change's record isn't in Redis, so another reading wouldn't find it.
        monkeypatch.setattr("redpoll.loop.slices.monotonic", itertools.count().__next__)
        await writer.fill([app(number) for number in range(100)], 1, "one")
        found = Directory(link, keys, again_s=0)

        def changed(*change: Any) -> None:
            # In the middle of the adoption.
            found.on_change = None
            found.apply(DirectoryChanged(2, "two", "one", "5", app(5, name="five")))

        found.on_change = changed
        found.read()
        await wait_until(lambda: found.version == 2)
        assert found.by_id["5"].name == "five"
        assert found.find("key99") == app(99)


class Pages:
    """A directory of which each HSCAN returns one record, and the link to it. `on_page` is called with each page's
    number after Redis has answered, and before the reader has the answer."""

    def __init__(self, keys, count: int) -> None:
        self.keys = keys
        self.records = {str(number): app(number) for number in range(count)}
        self.order = list(self.records)
        self.version: tuple[int, str] | None = (7, "id7")
        self.readings = 0
        self.on_page: Callable[[int], None] = lambda at: None
        self.directory = Directory(self, keys, again_s=0)

    async def ask(self, command: bytes, key: bytes, *args: Any) -> Any:
        await asyncio.sleep(0)
        if command == b"GET":
            number, id = self.version or (0, "")
            return None if self.version is None else f"{number} {len(self.records)} {id}".encode()
        at = int(args[0])
        self.readings += at == 0
        record = self.records.get(self.order[at])
        page = [] if record is None else [self.order[at].encode(), directory._ENCODER.encode(record)]
        at += 1
        self.on_page(at)
        return at % len(self.order), page

    def change(self, app_id: str, record: App | None, *, lost: bool = False) -> None:
        """As DirectoryWriter.put. `lost`: the worker doesn't get the message."""
        number, before = self.version
        self.version = number + 1, f"id{number + 1}"
        if record is None:
            del self.records[app_id]
        else:
            self.records[app_id] = record
        if not lost:
            self.directory.apply(DirectoryChanged(*self.version, before, app_id, record))

    def fill(self, version: tuple[int, str], records: dict[str, App]) -> None:
        """As DirectoryWriter.fill."""
        self.version, self.records = version, records
        self.directory.apply(DirectoryChanged(*version))

    async def read(self) -> None:
        self.directory.read()
        async with asyncio.timeout(60):
            await self.directory.reached(self.version[0])

    @property
    def all_known(self) -> bool:
        found = self.directory
        return (found.version, found.id) == self.version and found.by_id == self.records


class TestChangesDuringAReading:
    @pytest.fixture
    def pages(self, keys):
        return Pages(keys, 40)

    async def test_one_reading_is_enough_and_each_app_changes_once(self, pages):
        changed = []
        pages.directory.on_change = lambda app_id, old, new: changed.append(app_id)

        def on_page(at: int) -> None:
            # Apps of pages 0 to 9 were read before their change, those of 20 to 39 are read after it.
            match at:
                case 10:
                    pages.change("0", app(0, name="first"))
                    pages.change("30", app(30, name="first"))
                    pages.change("1", None)
                    pages.change("31", None)
                    pages.change("new", app(100))
                    pages.change("2", None)
                    pages.change("32", None)
                    pages.change("short", app(101))
                case 15:
                    pages.change("0", app(0, name="second"))
                    pages.change("30", app(30, name="second"))
                    pages.change("2", app(2, name="again"))
                    pages.change("32", app(32, name="again"))
                    pages.change("short", None)
                case 40:
                    # Before the reader has the last page.
                    pages.change("39", app(39, name="last"))
                    pages.change("3", None)

        pages.on_page = on_page
        await pages.read()
        assert pages.readings == 1
        assert pages.all_known
        assert pages.directory.complete
        assert sorted(changed) == sorted(pages.records)

    async def test_it_ends_although_each_page_meets_a_change(self, pages):
        pages.on_page = lambda at: pages.change("5", app(5, name=f"at {at}"))
        await pages.read()
        assert pages.readings == 1
        assert pages.all_known

    async def test_present_records_follow_too(self, pages):
        await pages.read()
        pages.on_page = lambda at: pages.change(str(at - 1), None if at % 2 else app(at, name="changed"))
        await pages.read()
        assert pages.readings == 2
        assert pages.all_known

    async def test_missing_one_begins_another_reading(self, pages):
        def on_page(at: int) -> None:
            if pages.readings == 1 and at in (10, 20, 30):
                pages.change("5", app(5, name=f"at {at}"))
                pages.change("6", None if at == 20 else app(6, name=f"at {at}"), lost=at == 20)

        pages.on_page = on_page
        await pages.read()
        assert pages.readings == 2
        assert pages.all_known

    async def test_missing_last_one_begins_another_reading(self, pages):
        def on_page(at: int) -> None:
            if (pages.readings, at) == (1, 10):
                pages.change("5", app(5, name="lost message"), lost=True)

        pages.on_page = on_page
        await pages.read()
        assert pages.readings == 2
        assert pages.all_known

    async def test_change_that_the_record_store_lost_is_not_taken_from_a_page(self, pages):
        before, used = pages.records.copy(), []
        pages.directory.on_change = lambda app_id, old, new: used.append(new)

        def on_page(at: int) -> None:
            match pages.readings, at:
                case 1, 10:
                    pages.change("15", app(15, name="lost"))
                case 1, 20:
                    pages.fill((7, "id7"), before)

        pages.on_page = on_page
        await pages.read()
        assert pages.readings == 2
        assert pages.all_known
        assert used == list(before.values())

    async def test_redis_that_is_emptied_and_filled_again_is_read_again(self, pages):
        await pages.read()

        def on_page(at: int) -> None:
            match pages.readings, at:
                case 2, 10:
                    pages.version, pages.records = None, {}
                case 2, 20:
                    pages.fill((9, "id9"), {"1": app(1, name="one"), "39": app(39)})
                case 2, 30:
                    pages.change("2", app(2))

        pages.on_page = on_page
        await pages.read()
        assert pages.readings == 3
        assert pages.all_known

    async def test_nothing_is_taken_from_a_redis_that_is_emptied_meanwhile(self, pages):
        def on_page(at: int) -> None:
            match pages.readings, at:
                case 1, 10:
                    pages.change("5", None)
                case 1, 20:
                    kept.append((pages.version, pages.records))
                    pages.version, pages.records = None, {}

        kept: list[Any] = []
        pages.on_page = on_page
        pages.directory.read()
        async with asyncio.timeout(60):
            while not kept:
                await asyncio.sleep(0)
            # Until that reading has ended, and others have begun.
            for _ in range(200):
                await asyncio.sleep(0)
            assert not pages.directory.by_id
            pages.version, pages.records = kept[0]
            await pages.directory.reached(8)
        assert pages.all_known

    @pytest.mark.parametrize("first", [True, False])
    async def test_change_just_before_or_after_a_version_was_asked_for(self, pages, first):
        """Its message comes before the reader resumes with that version."""
        ask = pages.ask

        async def ask_and_change(command: bytes, *args: Any) -> Any:
            if command != b"GET":
                return await ask(command, *args)
            if first:
                pages.change("5", None if "5" in pages.records else app(5))
                return await ask(command, *args)
            answer = await ask(command, *args)
            pages.change("5", None if "5" in pages.records else app(5))
            return answer

        pages.ask = ask_and_change
        await pages.read()
        assert pages.readings == 1
        assert pages.version == (9, "id9")
        assert pages.all_known


async def test_unreadable_record_affects_no_other_app(worker, writer, link, keys, wait_until):
    await wait_until(lambda: worker.directory.complete)
    await link.ask(b"HSET", keys.directory, "5", b'{"id":5}')
    await link.ask(b"SET", keys.directory_version, 2)
    await wait_until(lambda: worker.directory.version == 2)
    assert set(worker.directory.by_id) == {"1"}


async def test_empty_redis_has_no_version(writer):
    assert await writer.version() is None


async def test_change_during_a_reading_is_not_lost(worker, writer, wait_until):
    await wait_until(lambda: worker.directory.complete)
    for version in range(2, 60):
        worker.directory.read()
        await writer.put("2", app(2, name=f"v{version}"), version)
    await wait_until(lambda: worker.directory.version == 59)
    assert worker.directory.by_id["2"].name == "v59"


async def test_change_is_refused_if_the_directory_lacks_an_earlier_one_or_has_a_later_one(writer, link, keys):
    assert not await writer.put("1", app(1), 5)
    await writer.fill([app(1)], 4)
    assert await writer.put("2", app(2), 5)
    for version in (7, 5, 4):
        assert not await writer.put("3", app(3), version)
    assert (await writer.version()).number == 5
    assert sorted(await link.ask(b"HKEYS", keys.directory)) == [b"1", b"2"]


def test_directory_is_incomplete_until_it_was_read(link, keys):
    assert not Directory(link, keys).complete


async def test_records_of_an_earlier_start_are_not_complete(writer, start_worker, wait_until):
    await writer.fill([app(1)], 4)
    worker = await start_worker()
    worker.directory.require(None)
    await wait_until(lambda: worker.directory.version == 4)
    assert not worker.registry.ready
    worker.directory.require(5)
    assert not worker.registry.ready
    await writer.fill([app(2)], 5)
    await wait_until(lambda: worker.registry.ready)
    assert worker.directory.find("key1") is None
    assert worker.directory.find("key2") == app(2)


async def test_change_on_sys_can_make_the_records_complete(worker, writer, wait_until):
    await wait_until(lambda: worker.directory.complete)
    worker.directory.require(2)
    assert not worker.directory.complete
    await writer.put("2", app(2), 2)
    await wait_until(lambda: worker.directory.complete)


async def test_single_records_are_read_without_a_copy_of_the_directory(writer, link, keys):
    await writer.fill([app(1)], 1)
    await link.ask(b"HSET", keys.directory, "3", b"no json")
    assert await read_apps(link, keys, ["2", "1", "3"]) == [None, app(1), None]
    assert await read_apps(link, keys, []) == []


async def test_other_change_with_the_same_number_is_read(worker, writer, wait_until):
    await wait_until(lambda: worker.directory.complete)
    await writer.fill([app(1)], 2, "two")
    await writer.put("2", app(2), 3, "lost", before="two")
    await wait_until(lambda: worker.directory.version == 3)
    # The record store lost that change and made another one.
    await writer.fill([app(1)], 2, "two")
    await writer.put("3", app(3), 3, "other", before="two")
    await wait_until(lambda: set(worker.directory.by_id) == {"1", "3"})
    assert not await writer.put("4", app(4), 4, "four", before="lost")
    assert await writer.put("4", app(4), 4, "four", before="other")
    await wait_until(lambda: set(worker.directory.by_id) == {"1", "3", "4"})


async def test_directory_that_lost_its_records_has_no_version_and_makes_no_worker_ready(
    writer, start_worker, link, keys, wait_until
):
    await writer.fill([app(1), app(2)], 4)
    await link.ask(b"DEL", keys.directory)
    worker = await start_worker()
    assert await writer.version() is None
    assert await read_directory(link, keys) is None
    assert not await writer.put("2", app(2), 5)
    assert not worker.registry.ready
    await writer.fill([app(1), app(2)], 4)
    await wait_until(lambda: worker.registry.ready)
    assert set(worker.directory.by_id) == {"1", "2"}


async def test_directory_without_apps_is_complete(writer, start_worker, wait_until):
    await writer.fill([], 4)
    worker = await start_worker()
    await wait_until(lambda: worker.registry.ready)


async def test_replaced_leader_writes_nothing_more(writer, link, keys):
    await link.ask(b"SET", keys.leader, "aaaaaaaaaaaa 3 17")
    assert await writer.fill([app(1)], 4, "four", leads_with="aaaaaaaaaaaa 3 ")
    await link.ask(b"SET", keys.leader, "bbbbbbbbbbbb 4 1")
    assert not await writer.fill([app(2)], 3, "three", leads_with="aaaaaaaaaaaa 3 ")
    # Another term of the same node.
    assert not await writer.fill([app(2)], 3, "three", leads_with="bbbbbbbbbbbb 3 ")
    assert await writer.version() == (4, "four")
    assert await link.ask(b"HKEYS", keys.directory) == [b"1"]
