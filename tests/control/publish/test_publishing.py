"""Publishing while Redis is away, hangs and is back."""


async def test_publishes_get_503_while_redis_is_killed_and_then_work_again(make_plane, own_redis, wait_until):
    plane = await make_plane(own_redis.url)
    assert (await plane.trigger()).status == 200
    own_redis.kill()
    assert (await plane.trigger()).status == 503
    own_redis.start()
    await wait_until(lambda: plane.plane.publishing.publisher.open)
    assert (await plane.trigger()).status == 200


async def test_publishes_get_503_in_time_while_redis_hangs(make_plane, own_redis):
    plane = await make_plane(own_redis.url)
    own_redis.pause()
    try:
        assert (await plane.trigger()).status == 503
    finally:
        own_redis.resume()
