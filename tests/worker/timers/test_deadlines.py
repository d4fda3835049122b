"""When the janitor pings and closes, tick by tick: connections that the test plays, and no clock."""

import time

import pytest

from redpoll import _engine, _frame
from redpoll._wheel import Timed
from redpoll.config.settings import Settings
from redpoll.protocol.access import PENDING
from redpoll.protocol.apps import App, CurrentApp
from redpoll.protocol.grants import AppGrants
from redpoll.protocol.session import Session
from redpoll.worker.timers.janitor import Janitor


class Peer(Timed):
    """A connection of which the test decides when bytes come from it. `answers`: at once to each ping. All times are
    ticks since it was opened."""

    def __init__(self, site, answers=False):
        self.session = Session((1, 1), site.current)
        self.looks = 0
        self.pings = []
        self.closed = None
        self._state = _engine.OPEN
        self._answers = answers
        self._janitor = site.janitor
        self._opened = site.janitor.tick
        site.janitor.opened(self)

    @property
    def state(self):
        self.looks += 1
        return self._state

    def send(self, data):
        self.pings.append(self._janitor.tick - self._opened)
        if self._answers:
            self.heard_tick = self._janitor.tick

    def shut(self, code, message):
        self._state = _engine.CLOSING
        self.closed = (code, self._janitor.tick - self._opened)
        self._janitor.departed(self)


class Site:
    """A janitor whose ticks the test advances, four a second, and the record of an app."""

    def __init__(self, sign_in_s=0.0, **settings):
        self.unsettled = False
        self.app = App(id="1", name="test", keys=(), user_authentication_timeout_s=sign_in_s)
        self.current = CurrentApp(self.app, AppGrants(time.time))
        self.janitor = Janitor(Settings(**settings), lambda: None, self, lambda: None, head_late=None, http_late=None)

    def check(self, tick):
        """As Backpressure, which this is for the janitor."""

    def closing(self, connection):
        """The same."""

    def pass_ticks(self, count):
        for _ in range(count):
            self.janitor.advance()


class TestIdleTimes:
    """Timeouts in ticks, four a second."""

    @pytest.mark.parametrize(
        ("activity_s", "pong_s", "closed_at"),
        # One tick may be added where looks come more often than `pong_timeout_s`.
        [(1, 5, 24), (2, 3, 21), (1, 1, 8), (5, 1, 24), (120, 30, 600)],
    )
    async def test_a_peer_that_is_gone_is_pinged_once_and_closed_in_time(self, activity_s, pong_s, closed_at):
        site = Site(activity_timeout_s=activity_s, pong_timeout_s=pong_s)
        peer = Peer(site)
        site.pass_ticks(700)
        assert peer.pings == [activity_s * 4]
        assert peer.closed == (4201, closed_at)

    @pytest.mark.parametrize(("activity_s", "pong_s"), [(1, 5), (1, 1), (120, 30), (2, 3)])
    async def test_a_client_that_answers_at_once_is_pinged_after_each_silence(self, activity_s, pong_s):
        site = Site(activity_timeout_s=activity_s, pong_timeout_s=pong_s)
        peer = Peer(site, answers=True)
        ticks = activity_s * 4
        site.pass_ticks(5 * ticks)
        assert peer.pings == [ticks * number for number in range(1, 6)]
        assert peer.closed is None

    async def test_a_client_that_answers_once_is_closed_in_time_later(self):
        site = Site(activity_timeout_s=1, pong_timeout_s=5)
        peer = Peer(site)
        site.pass_ticks(5)
        peer.heard_tick = site.janitor.tick
        site.pass_ticks(100)
        assert peer.pings == [4, 9]
        assert peer.closed == (4201, 29)

    async def test_an_idle_connection_costs_two_looks_for_each_ping(self):
        site = Site()
        peer = Peer(site, answers=True)
        site.pass_ticks(480 * 10)
        assert len(peer.pings) == 10
        assert peer.looks == 19

    async def test_the_time_to_answer_is_not_cut_by_another_ping(self):
        """`Janitor.ping` takes a tick from `heard_tick`."""
        site = Site(activity_timeout_s=1, pong_timeout_s=5)
        peer = Peer(site)
        assert await site.janitor.ping([peer], _frame.ping(), 0) == [peer]
        site.pass_ticks(100)
        # The first one is that ping.
        assert peer.pings == [0, 4]
        assert peer.closed == (4201, 24)

    async def test_a_client_that_waited_for_its_place_is_pinged_before_it_is_closed(self):
        site = Site(activity_timeout_s=1, pong_timeout_s=1)
        site.pass_ticks(20)
        # Its head came at the beginning.
        peer = Peer(site)
        site.pass_ticks(20)
        assert peer.pings == [4]
        assert peer.closed == (4201, 8)


class TestSignIn:
    """pusher-js never returns after 4009, so no client that did its part may get it."""

    async def test_a_subscribe_that_is_refused_later_does_not_count(self):
        site = Site(sign_in_s=3)
        peer = Peer(site)
        peer.session.channels["private-x"] = PENDING
        site.pass_ticks(60)
        assert peer.closed is None
        peer.session.refused("private-x", "address", 0.0)
        site.pass_ticks(4)
        assert peer.closed[0] == 4009
        assert not site.janitor.unauthorised

    async def test_a_changed_timeout_counts_for_a_client_that_waits_for_redis(self):
        site = Site(sign_in_s=3)
        peer = Peer(site)
        peer.session.channels["private-x"] = PENDING
        site.pass_ticks(20)
        site.current.record = App(id="1", name="test", keys=(), user_authentication_timeout_s=30)
        site.janitor.sign_in_timeout_changed(peer)
        assert site.janitor.unauthorised == 1
        del peer.session.channels["private-x"]
        site.pass_ticks(200)
        assert peer.closed == (4009, 20 + 30 * 4 + 1)

    async def test_time_in_which_clients_are_not_read_does_not_count(self):
        site = Site(sign_in_s=3)
        peer = Peer(site)
        site.pass_ticks(6)
        site.unsettled = True
        site.pass_ticks(100)
        assert peer.closed is None
        site.unsettled = False
        # What it sent meanwhile is read only now.
        site.pass_ticks(12)
        assert peer.closed is None
        site.pass_ticks(1)
        assert peer.closed == (4009, 119)

    async def test_a_client_that_comes_after_that_time_has_no_longer(self):
        site = Site(sign_in_s=3)
        Peer(site)
        site.unsettled = True
        site.pass_ticks(100)
        site.unsettled = False
        site.pass_ticks(10)
        later = Peer(site)
        site.pass_ticks(13)
        assert later.closed == (4009, 13)


class Answered(Timed):
    """An HTTP connection that closes after its last answer."""

    state = _engine.CLOSING

    def __init__(self, site, unsent_bytes):
        # The kernel is full, and takes no more for now.
        self.unsent_bytes = self.undelivered_bytes = unsent_bytes
        self.cut_at = None
        self._janitor = site.janitor
        site.janitor.http_closing(self)

    def abort(self):
        self.cut_at = self._janitor.tick - 1
        self._janitor.departed(self)


class TestLastAnswers:
    """In ticks: what has no progress is cut after 20."""

    async def test_a_client_that_reads_on_gets_all_of_it(self):
        site = Site()
        client = Answered(site, 8_000_000)
        while client.undelivered_bytes:
            site.pass_ticks(15)
            client.undelivered_bytes -= 1_000_000
        assert client.cut_at is None
        # Then its end is waited for as for any other.
        site.pass_ticks(40)
        assert client.cut_at == 160

    @pytest.mark.parametrize("unsent_bytes", [0, 4096, 8_000_000])
    async def test_one_that_reads_nothing_is_cut_after_the_time_to_close(self, unsent_bytes):
        site = Site()
        client = Answered(site, unsent_bytes)
        site.pass_ticks(60)
        assert client.cut_at == 20

    async def test_one_that_stops_reading_is_cut(self):
        site = Site()
        client = Answered(site, 8_000_000)
        site.pass_ticks(10)
        client.undelivered_bytes = 7_000_000
        site.pass_ticks(100)
        assert client.cut_at == 40

    async def test_one_that_reads_hardly_anything_is_cut_after_a_minute(self):
        site = Site()
        client = Answered(site, 8_000_000)
        for _ in range(400):
            site.pass_ticks(1)
            client.undelivered_bytes -= 1
        assert client.cut_at == 240
        assert not site.janitor._last_answers
