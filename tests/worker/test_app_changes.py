"""A changed app record and the connections that are open. Others are tested with what they change."""


async def test_an_app_that_is_deleted_closes_its_sockets_with_4001(bench):
    worker = await bench.start()
    client = await bench.client(worker)
    await bench.put("1", None)
    error = await client.until("pusher:error")
    assert error["data"]["code"] == 4001


async def test_an_app_that_is_disabled_closes_its_sockets_with_4003(bench):
    workers = [await bench.start(), await bench.start()]
    clients = [await bench.client(worker) for worker in workers]
    await clients[0].subscribe("news")
    await bench.change(enabled=False)
    for client in clients:
        assert await client.closed_with() == 4003
    await bench.change(enabled=True)
    await (await bench.client(workers[0])).nothing_more()
