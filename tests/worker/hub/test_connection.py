"""What the worker says to one connection, and how it prints."""

from redpoll.protocol.errors import Code


async def test_a_closed_client_gets_the_error_and_the_same_words_in_the_close_frame(bench):
    worker = await bench.start()
    client = await bench.client(worker)
    (connection,) = worker.hub.open_connections
    connection.shut(Code.RECONNECT, "the server is draining")
    assert await client.next() == {"event": "pusher:error", "data": {"code": 4200, "message": "the server is draining"}}
    await client.socket.wait_closed()
    assert (client.socket.close_code, client.socket.close_reason) == (4200, "the server is draining")


async def test_a_connection_prints_its_socket_id(bench):
    worker = await bench.start()
    client = await bench.client(worker)
    (connection,) = worker.hub.open_connections
    assert str(connection) == f"connection {client.socket_id}"
    assert connection.address == "127.0.0.1"
    assert connection.proxied_peer is None
    assert not connection.is_http
