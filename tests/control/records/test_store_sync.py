"""Following a record store; how, is in test_record_sync.py and test_redis_sync.py."""

from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.control.records.records import Records
from redpoll.control.records.store_sync import StoreSync
from redpoll.store.store import Store, database_url


async def test_store_of_its_own_is_up_and_never_read_again(tmp_path):
    store = await Store.open(database_url(tmp_path))
    records = Records(store)
    await records.load()
    synced = []
    sync = StoreSync(Link("unix:///nowhere/redis.sock"), Keys(), records, store, lambda: synced.append(1))
    sync.start()
    sync.link_up()
    sync.received(Keys().records, b"1")
    assert sync.store_up == 1
    await records.create_app("one")
    await sync.finish()
    assert synced == []
    await store.close()
