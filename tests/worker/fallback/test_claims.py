import asyncio

import pytest

from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.worker.fallback.claims import ENDED, Claims, SessionName

NAME = SessionName("key", "7/abcdefgh")


@pytest.fixture
async def link(redis):
    link = Link(redis.url)
    link.start()
    await link.wait_up()
    yield link
    await link.close()


async def answer(ask, name=NAME):
    done = asyncio.get_running_loop().create_future()
    ask(name, done.set_result)
    return await done


async def test_one_of_two_workers_gets_a_session(link):
    one, two = Claims(link, Keys(), "run.1"), Claims(link, Keys(), "run.2")
    assert await answer(one.claim) == ""
    assert await answer(two.claim) == "run.1"
    assert await answer(two.find) == "run.1"
    assert await answer(two.find, SessionName("other", NAME.session)) == ""


async def test_ended_session_is_not_opened_again(link):
    claims = Claims(link, Keys(), "run.1")
    await answer(claims.claim)
    claims.release(NAME)
    assert await answer(claims.claim) == ENDED
    assert 0 < await link.ask(b"TTL", Keys().fallback(*NAME)) <= 60


async def test_renewing_writes_what_redis_lost(link):
    claims = Claims(link, Keys(), "run.1")
    await answer(claims.claim)
    assert await link.ask(b"TTL", Keys().fallback(*NAME)) > 3000
    await link.ask(b"FLUSHALL")
    assert await answer(claims.renew) == ""
    assert await answer(claims.find) == "run.1"
    assert await answer(claims.renew) == "run.1"


async def test_renewing_lengthens_the_life_of_a_claim(link):
    claims = Claims(link, Keys(), "run.1")
    await answer(claims.claim)
    await link.ask(b"EXPIRE", Keys().fallback(*NAME), 5)
    await answer(claims.renew)
    assert await link.ask(b"TTL", Keys().fallback(*NAME)) > 3000


async def test_session_that_another_worker_marked_as_ended_is_not_renewed(link):
    one, two = (Claims(link, Keys(), own) for own in ("run.1", "run.2"))
    # A session that Redis doesn't know leaves nothing there.
    assert await answer(two.end) == ""
    assert await answer(two.find) == ""
    await answer(one.claim)
    assert await answer(two.end) == "run.1"
    assert await link.ask(b"TTL", Keys().fallback(*NAME)) > 3000
    assert await answer(one.renew) == ENDED
    assert await answer(one.find) == ENDED


async def test_nothing_is_known_while_redis_is_away(redis):
    claims = Claims(Link(redis.url), Keys(), "run.1")
    assert await answer(claims.claim) is None
    assert await answer(claims.find) is None


async def test_session_that_never_began_may_be_opened_again(link):
    one, two = (Claims(link, Keys(), own) for own in ("run.1", "run.2"))
    assert await answer(one.claim) == ""
    one.give_up(NAME)
    assert await answer(two.claim) == ""
