"""Finding the master: real Sentinels, which replace a master that hangs."""

import asyncio
import signal

import pytest
from redis.exceptions import ResponseError

from helpers.sentinel import sentinel_service
from redpoll.cluster.redis.link import Link
from redpoll.cluster.redis.sentinels import Sentinels
from redpoll.config.redis_url import RedisUrl


@pytest.fixture(scope="module")
def service():
    # A server that stops for a moment isn't replaced. The test of a fail-over shortens the time.
    with sentinel_service(down_after_ms=60_000) as service:
        yield service


@pytest.fixture(autouse=True)
def _patient_with_sentinels(monkeypatch):
    monkeypatch.setattr("redpoll.cluster.redis.sentinels._ANSWER_WITHIN_S", 60.0)


async def connected(service) -> Link:
    link = Link(service.url, first_delay_s=0.01, max_delay_s=0.05)
    link.start()
    await link.wait_up()
    return link


async def test_replica_is_not_taken_for_the_master(service, wait_until, monkeypatch):
    replica = service.nodes[1]
    reasons = []
    monkeypatch.setattr(
        "redpoll.cluster.redis.link.log.warning", lambda event, **fields: reasons.append(fields["reason"])
    )

    async def stale(self):
        return "127.0.0.1", replica.port

    monkeypatch.setattr(Sentinels, "master", stale)
    link = Link(service.url, first_delay_s=0.01, max_delay_s=0.05)
    link.start()
    await wait_until(lambda: reasons)
    assert reasons[0] == "the server is a replica"
    assert not link.up
    await link.close()


async def test_unknown_service_is_named_and_credentials_are_not(service):
    url = service.url.replace(f"/{service.NAME}", "/other")
    sentinels = Sentinels(RedisUrl.parse(url))
    with pytest.raises(OSError, match="no Sentinel knows the master of other") as raised:
        await sentinels.master()
    assert service.PASSWORD not in str(raised.value)
    await sentinels.close()
    wrong = Sentinels(RedisUrl.parse(service.url.replace(service.PASSWORD, "hunter2")))
    with pytest.raises(OSError, match="invalid username-password pair") as raised:
        await wrong.master()
    assert "hunter2" not in str(raised.value)
    await wrong.close()


async def test_sentinel_that_missed_a_fail_over_is_not_believed(service):
    sentinels = Sentinels(RedisUrl.parse(service.url))
    await sentinels.master()
    sentinels._epoch += 1
    with pytest.raises(OSError, match="knows of the last fail-over"):
        await sentinels.master()
    await sentinels.close()


async def test_lower_epoch_is_taken_when_a_majority_has_agreed_on_it_for_some_seconds(service):
    now = 0.0
    # The Sentinels know epoch 0 only, as after they were set up anew. A fourth one isn't there.
    url = service.url.replace("/cache", ",127.0.0.1:1/cache")
    sentinels = Sentinels(RedisUrl.parse(url), clock=lambda: now)
    master = await sentinels.master()
    epoch = sentinels._epoch
    sentinels._epoch = epoch + 3
    refused = pytest.raises(OSError, match="knows of the last fail-over")
    for now in (10.0, 14.9):  # noqa: B007
        with refused:
            await sentinels.master()
    # For a moment no Sentinel answers: nobody knows what they would have said.
    sentinels._url, known = RedisUrl.parse("redis+sentinel://127.0.0.1:1/cache"), sentinels._url
    await sentinels.close()
    with pytest.raises(OSError, match="no Sentinel knows"):
        await sentinels.master()
    sentinels._url = known
    await sentinels.close()
    for now in (15.0, 19.9):  # noqa: B007
        with refused:
            await sentinels.master()
    now = 20.0
    assert await sentinels.master() == master
    assert sentinels._epoch == epoch
    # Two of four are no majority.
    sentinels._epoch = epoch + 3
    sentinels._url = RedisUrl.parse(url.replace(f"127.0.0.1:{service.sentinels[0].port}", "127.0.0.1:2"))
    await sentinels.close()
    for now in (30.0, 60.0):  # noqa: B007
        with refused:
            await sentinels.master()
    await sentinels.close()


class Promoting:
    """A Sentinel that carries a fail-over out, and hasn't yet read the INFO of the replica that it promotes."""

    def __init__(self, flags: str, replicas: list[list[str]] | ResponseError) -> None:
        self.flags = flags
        self.replicas = replicas

    def pipeline(self, transaction: bool) -> "Promoting":
        self.answers: list[object] = []
        return self

    def execute_command(self, *command: str) -> None:
        master = ["name", "cache", "flags", self.flags, "config-epoch", "3"]
        self.answers.append({"MASTER": master, "REPLICAS": self.replicas}.get(command[1], ["127.0.0.1", "1"]))

    async def execute(self, raise_on_error: bool = True) -> list[object]:
        answers, self.answers = self.answers, []
        return answers

    async def aclose(self) -> None:
        pass


async def test_replica_that_is_promoted_is_taken_before_its_sentinel_names_it():
    replicas = [
        ["ip", "127.0.0.1", "port", "2", "flags", "slave"],
        ["ip", "127.0.0.1", "port", "3", "flags", "slave,promoted"],
    ]
    failing_over = "master,s_down,o_down,failover_in_progress"
    sentinels = Sentinels(RedisUrl.parse("redis+sentinel://127.0.0.1:26379/cache"))
    other = Promoting("master,s_down", replicas)
    sentinels._clients = [other, Promoting(failing_over, replicas)]
    assert await sentinels.master() == ("127.0.0.1", 3)
    # None is chosen yet.
    sentinels._clients = [other, Promoting(failing_over, replicas[:1])]
    assert await sentinels.master() == ("127.0.0.1", 1)
    # The master is back while the promotion hangs.
    sentinels._clients = [other, Promoting("master,failover_in_progress", replicas)]
    assert await sentinels.master() == ("127.0.0.1", 1)
    # The ACL doesn't allow SENTINEL REPLICAS.
    sentinels._clients = [other, Promoting(failing_over, ResponseError("NOPERM"))]
    assert await sentinels.master() == ("127.0.0.1", 1)
    await sentinels.close()


async def test_link_leaves_a_master_that_hangs_for_its_successor(service, wait_until):
    first = service.master()
    link = await connected(service)
    await link.ask(b"SET", b"key", b"value")
    await link.ask(b"WAIT", 1, 5000)
    service.set_down_after(500)
    # Nothing closes the connection. The first master will come back as a replica, but only after some seconds.
    first.signal(signal.SIGSTOP)
    await wait_until(lambda: link.reconnects == 1 and link.up)
    first.signal(signal.SIGCONT)
    assert await link.ask(b"GET", b"key") == b"value"
    assert await link.ask(b"SET", b"key", b"again") == b"OK"
    assert link.reconnects == 1
    await link.close()


async def test_link_finds_the_master_by_sentinels_that_were_set_up_anew_after_a_fail_over(wait_until, monkeypatch):
    monkeypatch.setattr("redpoll.cluster.redis.sentinels._AGREED_FOR_S", 0.2)
    with sentinel_service() as service:
        link = await connected(service)
        first = service.master()
        first.kill()
        await wait_until(lambda: link.reconnects and link.up)
        second = service.master()
        # The Sentinels would need some seconds to make it a replica.
        await asyncio.to_thread(first.start)
        with first.client() as client:
            client.replicaof("127.0.0.1", second.port)
        await asyncio.to_thread(service.set_up_anew)
        connects = link.connects
        link.drop("for the test")
        await wait_until(lambda: link.connects > connects and link.up)
        assert await link.ask(b"SET", b"key", b"value") == b"OK"
        await link.close()
