"""Finding the master: real Sentinels, which replace a master that hangs."""

import asyncio
import signal

import pytest
from redis.exceptions import ResponseError

from helpers.sentinel import sentinel_service
from redpoll.cluster.redis.link import Link
from redpoll.cluster.redis.sentinels import Sentinels
from redpoll.config.redis_url import RedisUrl

# A server that stops for a moment isn't replaced. Tests of a fail-over shorten the time until it has begun.
PATIENT_MS, QUICK_MS = 60_000, 500


@pytest.fixture(scope="module")
def service():
    with sentinel_service(down_after_ms=PATIENT_MS) as service:
        yield service


@pytest.fixture(autouse=True)
def _patient_with_sentinels(monkeypatch):
    monkeypatch.setitem(Sentinels.__init__.__kwdefaults__, "answer_within_s", 60.0)


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


class FakeSentinel:
    """Answers as one that knows this state of the master and these replicas, at 127.0.0.1:1."""

    def __init__(
        self, *, epoch: int = 3, flags: str = "master", replicas: list[list[str]] | ResponseError | None = None
    ) -> None:
        self.epoch = epoch
        self.flags = flags
        self.replicas = replicas or []
        self.is_away = False

    def pipeline(self, transaction: bool) -> "FakeSentinel":
        self.answers: list[object] = []
        return self

    def execute_command(self, *command: str) -> None:
        master = ["name", "cache", "flags", self.flags, "config-epoch", str(self.epoch)]
        self.answers.append({"MASTER": master, "REPLICAS": self.replicas}.get(command[1], ["127.0.0.1", "1"]))

    async def execute(self, raise_on_error: bool = True) -> list[object]:
        if self.is_away:
            raise OSError("away")
        answers, self.answers = self.answers, []
        return answers

    async def aclose(self) -> None:
        pass


def asking(*fakes: FakeSentinel, hosts: str = "a,b,c", **more) -> Sentinels:
    return Sentinels(RedisUrl.parse(f"redis+sentinel://{hosts}/cache"), connect=lambda _: list(fakes), **more)


async def test_sentinel_that_missed_a_fail_over_is_not_believed():
    informed, late = FakeSentinel(epoch=4), FakeSentinel(epoch=3)
    sentinels = asking(informed, late)
    await sentinels.master()
    informed.is_away = True
    with pytest.raises(OSError, match="knows of the last fail-over"):
        await sentinels.master()


async def test_lower_epoch_is_taken_when_a_majority_has_agreed_on_it_for_some_seconds():
    now = 0.0
    # Of four, one isn't there.
    fakes = [FakeSentinel(epoch=3) for _ in range(3)]
    sentinels = asking(*fakes, hosts="a,b,c,d", clock=lambda: now)

    async def refused() -> None:
        with pytest.raises(OSError, match="knows of the last fail-over"):
            await sentinels.master()

    def set_up_anew(is_away: bool = False) -> None:
        for fake in fakes:
            fake.epoch, fake.is_away = 0, is_away

    master = await sentinels.master()
    set_up_anew()
    for now in (10.0, 14.9):  # noqa: B007
        await refused()
    # For a moment no Sentinel answers: nobody knows what they would have said.
    set_up_anew(is_away=True)
    with pytest.raises(OSError, match="no Sentinel knows"):
        await sentinels.master()
    set_up_anew()
    for now in (15.0, 19.9):  # noqa: B007
        await refused()
    now = 20.0
    # It is the epoch from now on.
    for _ in range(2):
        assert await sentinels.master() == master
    # Two of four are no majority.
    fakes[0].epoch = 3
    await sentinels.master()
    fakes[0].is_away = True
    for now in (30.0, 60.0):  # noqa: B007
        await refused()


async def test_replica_that_is_promoted_is_taken_before_its_sentinel_names_it():
    """A Sentinel carries a fail-over out, and hasn't yet read the INFO of the replica that it promotes."""
    replicas = [
        ["ip", "127.0.0.1", "port", "2", "flags", "slave"],
        ["ip", "127.0.0.1", "port", "3", "flags", "slave,promoted"],
    ]
    failing_over = "master,s_down,o_down,failover_in_progress"
    other = FakeSentinel(flags="master,s_down", replicas=replicas)

    async def master(flags: str, replicas: list[list[str]] | ResponseError) -> tuple[str, int]:
        return await asking(other, FakeSentinel(flags=flags, replicas=replicas)).master()

    assert await master(failing_over, replicas) == ("127.0.0.1", 3)
    # None is chosen yet.
    assert await master(failing_over, replicas[:1]) == ("127.0.0.1", 1)
    # The master is back while the promotion hangs.
    assert await master("master,failover_in_progress", replicas) == ("127.0.0.1", 1)
    # The ACL doesn't allow SENTINEL REPLICAS.
    assert await master(failing_over, ResponseError("NOPERM")) == ("127.0.0.1", 1)


async def test_link_leaves_a_master_that_hangs_for_its_successor(service, wait_until):
    first = service.master()
    link = await connected(service)
    await link.ask(b"SET", b"key", b"value")
    assert await link.ask(b"WAIT", 1, 60_000) >= 1
    service.set_down_after(QUICK_MS)
    # Nothing closes the connection. The first master will come back as a replica, but only after some seconds.
    first.signal(signal.SIGSTOP)
    await wait_until(lambda: link.reconnects == 1 and link.up)
    service.set_down_after(PATIENT_MS)
    first.signal(signal.SIGCONT)
    assert await link.ask(b"GET", b"key") == b"value"
    assert await link.ask(b"SET", b"key", b"again") == b"OK"
    assert link.reconnects == 1
    await link.close()


async def test_link_finds_the_master_by_sentinels_that_were_set_up_anew_after_a_fail_over(wait_until, monkeypatch):
    monkeypatch.setitem(Sentinels.__init__.__kwdefaults__, "agreed_for_s", 0.2)
    with sentinel_service(down_after_ms=PATIENT_MS) as service:
        link = await connected(service)
        first = service.master()
        service.set_down_after(QUICK_MS)
        first.kill()
        await wait_until(lambda: link.reconnects and link.up)
        service.set_down_after(PATIENT_MS)
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
