"""A Redis that redpoll can't use."""

import redis.asyncio

from redpoll.ipc.messages import Fatal


async def test_an_unsuitable_redis_ends_the_start_with_a_reason(make_plane, own_redis, wait_until):
    async with redis.asyncio.Redis(unix_socket_path=own_redis.path) as admin:
        await admin.execute_command("ACL", "SETUSER", "poor", "on", ">pass", "~*", "resetchannels", "+@all")
    plane = await make_plane(own_redis.url + "?username=poor&password=pass", ready=False)
    await wait_until(lambda: any(isinstance(message, Fatal) for message in plane.heard))
    (fatal,) = [message.reason for message in plane.heard if isinstance(message, Fatal)]
    assert "may not use PUBLISH on our keys or topics" in fatal
    assert "&rp:*" in fatal
