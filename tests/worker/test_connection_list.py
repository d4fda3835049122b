"""A page of connections for the dashboard."""

from types import SimpleNamespace

from redpoll.cluster.questions import ListConnections
from redpoll.worker.connection_list import MAX_CONNECTIONS, page_of
from redpoll.worker.hub.client_libraries import ClientSeen


def connection(number, *, app="3", library="js 8.6.0", since=100, channels=(), user=None, peer=("10.0.0.1", 5), **more):
    session = SimpleNamespace(
        app=SimpleNamespace(id=app), socket_id=f"{number}.1", channels=dict.fromkeys(channels), user_id=user
    )
    return SimpleNamespace(
        session=session,
        client_seen=ClientSeen(library, since),
        peer=peer,
        unsent_bytes=0,
        transport_name="websocket",
        **more,
    )


async def sockets(connections, **question):
    page = await page_of(connections, ListConnections("", **question))
    return [connection["socket"] for connection in page["connections"]]


async def test_the_newest_of_an_app_come_first_and_all_are_counted():
    everyone = [connection(1, since=5), connection(2, since=9), connection(3, app="4"), connection(4, since=7)]
    page = await page_of(everyone, ListConnections("3", limit=2))
    assert page["total"] == 3
    assert [connection["socket"] for connection in page["connections"]] == ["2.1", "4.1"]
    assert len((await page_of(everyone, ListConnections("")))["connections"]) == 4


async def test_connections_are_found_by_socket_user_address_library_and_channel():
    everyone = [
        connection(11, user="anna", channels=("news", "presence-a")),
        connection(22, library="swift 10.1", peer=None),
        connection(33, peer_address=("192.0.2.7", 1)),
    ]
    assert await sockets(everyone, find="22.") == ["22.1"]
    assert await sockets(everyone, find="ann") == ["11.1"]
    assert await sockets(everyone, find="192.0.2.") == ["33.1"]
    assert await sockets(everyone, find="swift") == ["22.1"]
    assert await sockets(everyone, channel="news") == ["11.1"]
    assert await sockets(everyone, channel="new") == []


async def test_an_answer_is_bounded():
    everyone = [connection(at, channels=[f"c{n}" for n in range(50)]) for at in range(MAX_CONNECTIONS + 10)]
    page = await page_of(everyone, ListConnections("", limit=10**9))
    assert (page["total"], len(page["connections"])) == (MAX_CONNECTIONS + 10, MAX_CONNECTIONS)
    assert (page["connections"][0]["channels"], len(page["connections"][0]["named"])) == (50, 20)
