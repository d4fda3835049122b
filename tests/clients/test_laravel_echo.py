"""laravel-echo with its `reverb` broadcaster: what a Laravel front end does, across workers."""

from clients.node import Node
from helpers.server import Server
from helpers.wire import Api, Socket, eventually


async def echo_and_socket_on_another_worker(server: Server, node: Node, auth_url: str, user: str) -> tuple[str, Socket]:
    """The socket id of an Echo signed in as `user`, and a bare socket on another worker."""
    before = server.client_ports()
    socket_id = await node.echo(user, f"{auth_url}?user={user}")
    (holder,) = [pid for pid, ports in server.client_ports().items() if ports - before[pid]]
    for _ in range(64):
        socket = await Socket.connect(server)
        if server.worker_of(socket.port) != holder:
            return socket_id, socket
        await socket.close()
    raise AssertionError("the kernel gave 65 connections to one worker")


async def test_event_names_of_laravel_reach_the_listener(server: Server, node: Node) -> None:
    await node.echo("page")
    await node.call(
        "echo_listen",
        client="page",
        channel="orders",
        kind="public",
        events=["OrderShipped", ".order.named"],
    )
    await node.seen(client="page", event="subscribed")
    async with Api(server) as api:
        await api.publish("orders", "App\\Events\\OrderShipped", '{"id":1}')
        await api.publish("orders", "order.named", '{"id":2}')
    assert (await node.seen(client="page", event="OrderShipped"))["data"] == {"id": 1}
    assert (await node.seen(client="page", event=".order.named"))["data"] == {"id": 2}


async def test_to_others_skips_the_page_that_acted(server: Server, node: Node, auth_url: str) -> None:
    """`toOthers()` sends Echo's socketId back as `socket_id`, whichever worker holds the page."""
    acting, other = await echo_and_socket_on_another_worker(server, node, auth_url, "acting")
    await node.call("echo_listen", client="acting", channel="board", kind="public", events=[".moved", ".end"])
    await node.seen(client="acting", event="subscribed")
    await other.subscribe("board")
    async with Api(server) as api:
        await api.publish("board", "moved", "{}", socket_id=acting)
        await api.publish("board", "end", "{}")
    await other.next("moved", "board")
    await node.seen(client="acting", event=".end")
    assert not node.matching(client="acting", event=".moved")
    await other.close()


async def test_presence_room_tells_here_joining_and_leaving(server: Server, node: Node, auth_url: str) -> None:
    _, other = await echo_and_socket_on_another_worker(server, node, auth_url, "anna")
    room = "presence-lobby"
    await node.call("echo_listen", client="anna", channel="lobby", kind="presence")
    assert (await node.seen(client="anna", event="here"))["data"] == [{"name": "name of anna"}]
    await other.subscribe(room, "bert", {"name": "Bert"})
    assert (await node.seen(client="anna", event="joining"))["data"] == {"name": "Bert"}
    other.unsubscribe(room)
    assert (await node.seen(client="anna", event="leaving"))["data"] == {"name": "Bert"}
    await other.close()


async def test_whisper_reaches_the_others_only(server: Server, node: Node, auth_url: str) -> None:
    for name in ("anna", "bert"):
        await node.echo(name, f"{auth_url}?user={name}")
        await node.call("echo_listen", client=name, channel="chat", kind="private", whispers=["typing", "answer"])
        await node.seen(client=name, event="subscribed")
    await node.call("echo_whisper", client="anna", channel="chat", event="typing", data={"name": "anna"})
    assert (await node.seen(client="bert", event="whisper typing"))["data"] == {"name": "anna"}
    await node.call("echo_whisper", client="bert", channel="chat", event="answer", data={})
    await node.seen(client="anna", event="whisper answer")
    assert not node.matching(client="anna", event="whisper typing")


async def test_refused_private_channel_calls_error(server: Server, node: Node, auth_url: str) -> None:
    """Without a user in the address the backend refuses, and Echo reports that without asking redpoll."""
    await node.echo("visitor", auth_url)
    await node.call("echo_listen", client="visitor", channel="members-only", kind="presence")
    assert (await node.seen(client="visitor", event="error"))["data"]["status"] == 403


async def test_second_tab_of_a_user_is_not_announced(server: Server, node: Node, auth_url: str) -> None:
    """Two tabs on any workers, one of them opened and closed thirty times."""
    room = "presence-tabs"
    _, observer = await echo_and_socket_on_another_worker(server, node, auth_url, "anna")
    await node.call("echo_listen", client="anna", channel="tabs", kind="presence")
    await node.seen(client="anna", event="here")
    success = await observer.subscribe(room, "observer")
    assert '"count":2' in success["data"].replace(" ", "")
    for _ in range(30):
        tab = await Socket.connect(server)
        await tab.subscribe(room, "anna", {"name": "name of anna"})
        await tab.close()
    await node.echo("anna's second tab", f"{auth_url}?user=anna")
    await node.call("echo_listen", client="anna's second tab", channel="tabs", kind="presence")
    await node.seen(client="anna's second tab", event="here")
    await node.call("echo_disconnect", client="anna's second tab")
    # A new member is announced after everything that would have been announced before.
    last = await Socket.connect(server)
    await last.subscribe(room, "last")
    await observer.next("pusher_internal:member_added", room)
    changes = [frame for frame in observer.frames if "member_" in frame["event"]]
    assert [frame["event"] for frame in changes] == ["pusher_internal:member_added"]
    assert '"last"' in changes[0]["data"]
    await node.seen(2, client="anna", event="joining")  # the observer and the last one
    assert len(node.matching(client="anna", event="joining")) == 2
    assert not node.matching(client="anna", event="leaving")
    async with Api(server) as api:
        assert await api.users(room) == ["anna", "last", "observer"]
    await observer.close()
    await last.close()


async def test_leave_unsubscribes_every_kind_of_the_name(server: Server, node: Node, auth_url: str) -> None:
    await node.echo("goer", f"{auth_url}?user=goer")
    await node.call("echo_listen", client="goer", channel="hall", kind="public")
    await node.seen(1, client="goer", event="subscribed")
    await node.call("echo_listen", client="goer", channel="hall", kind="presence")
    await node.seen(2, client="goer", event="subscribed")
    await node.call("echo_leave", client="goer", channel="hall")
    async with Api(server) as api:

        async def held() -> set[str]:
            return {"hall", "presence-hall"} & set((await api.get("/channels"))["channels"])

        await eventually(held, set())
