"""The debug console: a live view of an app's events, and a form to publish events.

The page connects to the public port with pusher-js and subscribes to a channel that only the dashboard can join: this
module signs the subscription with a key that the app's record has for this purpose only (control/dashboard/README.md
"Dashboard"). Publishers copy events to that channel only while the record says that somebody watches, so the page
renews this when it subscribes and every 30 s.

A subscription outlives the session that was allowed to make it. So this module remembers the console's connections, and
ends their subscription within seconds when their session ends, when their page no longer renews, or when their session
has opened too many others. Those of an earlier control process are ended too, because nothing is known of them: at the
start, and later every minute while this is the only node. (With others, these may know them.) A page whose subscription
was ended connects again, and is asked for its session again. Nothing else of a connection is touched: the ids that
pages name are theirs to choose.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from typing import Any, Final

import msgspec
import structlog
from sqlalchemy.exc import SQLAlchemyError

from redpoll.cluster.bus import Unavailable
from redpoll.cluster.nodes import NodesView
from redpoll.cluster.questions import ListConnections, Unsubscribe
from redpoll.cluster.survey import Survey
from redpoll.control.api.api import Api
from redpoll.control.dashboard.access import AccessControl, Visit
from redpoll.control.dashboard.forms import sentence
from redpoll.control.dashboard.pages import SECURITY
from redpoll.control.dashboard.setup import PublicAddress
from redpoll.control.http.response import Response
from redpoll.control.http.router import Route
from redpoll.control.records.records import Records
from redpoll.control.tracing.tracing import Tracer
from redpoll.protocol.apps import App, Key
from redpoll.protocol.auth import sign_channel
from redpoll.protocol.channels import CONSOLE
from redpoll.protocol.errors import ApiError
from redpoll.protocol.messages import decode_event
from redpoll.store.errors import reason_of

__all__ = ["ConsolePages"]

log = structlog.get_logger(__name__)

# The page renews both every 30 s. Browsers may run the timers of a hidden page only once a minute.
_WATCHED_S: Final = 150.0
_LEASE_S: Final = 180.0
_CHECK_EVERY_S: Final = 3.0
_SWEEP_EVERY_S: Final = 60.0
_MAX_LEASES: Final = 1_000
# Of one worker, at a time.
_MAX_FOUND: Final = 500
# Of one session, which has a console open in as many tabs.
_MAX_LEASES_EACH: Final = 20
# A page renews twice a minute, and asks for a signature when it connects.
_MAX_RENEWALS: Final = 60
_RENEWALS_PER_S: Final = 1.0
_MAX_SESSIONS: Final = 1_000
# The record isn't changed for a renewal that comes sooner.
_RENEWED_S: Final = 15.0
_SOCKET_ID: Final = re.compile(r"[0-9]{1,19}\.[0-9]{1,19}").fullmatch
# The form field that an error code is about. Other errors are about the data or the whole form.
_FIELDS: Final = {"invalid_channel": "channel", "invalid_event_name": "name"}
_JSON: Final = b"Content-Type: application/json\r\nCache-Control: no-store\r\n" + SECURITY


class ConsolePages:
    """`api` publishes events, `survey` closes connections. `tracer` is None if the event log is disabled."""

    def __init__(
        self,
        access: AccessControl,
        records: Records,
        api: Api,
        survey: Survey,
        tracer: Tracer | None,
        address: PublicAddress,
        nodes: NodesView,
    ) -> None:
        self._survey = survey
        # (app id, socket id) -> hash of the session, and when (monotonic) its page must have renewed it.
        self._leases: dict[tuple[str, str], tuple[str, float]] = {}
        # (app id, socket id) of leases that others have displaced, and of unknown ones, to be ended.
        self._displaced: dict[tuple[str, str], None] = {}
        # Hash of a session -> its renewals, less those that time has forgiven, and when (monotonic) that was.
        self._renewals: dict[str, tuple[float, float]] = {}
        self._checking: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._ending_unknown: asyncio.Task[None] | None = None
        self._access = access
        self._records = records
        self._api = api
        self._tracer = tracer
        self._address = address
        self._nodes = nodes

    def start(self) -> None:
        self._ending_unknown = asyncio.create_task(self._end_unknown(), name="unknown consoles")

    def routes(self) -> list[Route]:
        access = self._access
        return [
            access.route("GET", "/apps/{app_id}/console", "console", self.show),
            access.route("POST", "/apps/{app_id}/console/watch", "console_watch", self.watch),
            access.route("POST", "/apps/{app_id}/console/auth", "console_auth", self.authorize),
            access.route("POST", "/apps/{app_id}/console/publish", "console_publish", self.publish, "admin"),
        ]

    async def show(self, visit: Visit) -> Response:
        """GET …/console."""
        app = visit.app
        self._count(visit)
        key = await self._watch(app)
        address = self._address.of(visit.request)
        channel = visit.query.get("channel", "")
        return visit.page(
            "console.html",
            app=app,
            key=key.key,
            at=address,
            console=CONSOLE,
            channel=channel,
            sockets=(address.sockets,),
        )

    async def watch(self, visit: Visit) -> Response:
        """POST …/console/watch: the page is still open. `socket_id` is its connection's, if it is subscribed."""
        socket_id = visit.form.text("socket_id")
        self._count(visit)
        if socket_id:
            self._lease(visit, socket_id)
        await self._watch(visit.app)
        return Response(204, b"", SECURITY)

    async def _watch(self, app: App) -> Key:
        """Marks the app as watched, unless it has just been. Each change of its record reaches all workers."""
        now_s = time.time()
        if app.console_key is not None and app.console_until > now_s + _WATCHED_S - _RENEWED_S:
            return app.console_key
        return await self._records.watch_console(app.id, now_s + _WATCHED_S)

    def _count(self, visit: Visit) -> None:
        """Limits the renewals of a session. Raises ApiError."""
        session, now = visit.session.hash, time.monotonic()
        used, at = self._renewals.pop(session, (0.0, now))
        used = max(0.0, used - (now - at) * _RENEWALS_PER_S)
        if len(self._renewals) >= _MAX_SESSIONS:
            del self._renewals[next(iter(self._renewals))]
        self._renewals[session] = min(used + 1, _MAX_RENEWALS), now
        if used + 1 > _MAX_RENEWALS:
            raise ApiError("rate_limited", "Too many requests of the console within a minute; wait a moment.")

    async def authorize(self, visit: Visit) -> Response:
        """POST …/console/auth: socket_id, channel_name, as pusher-js asks."""
        key, socket_id = visit.app.console_key, visit.form.text("socket_id")
        if visit.form.text("channel_name") != CONSOLE or key is None:
            raise ApiError("forbidden", "This endpoint only authorizes the console's own channel.")
        self._count(visit)
        # Before it is signed: else the connection that it is for isn't found when the session ends.
        self._lease(visit, socket_id)
        # The page may have been away for longer than it was watched.
        await self._watch(visit.app)
        signature = sign_channel(key.secret, socket_id, CONSOLE)
        return Response(200, msgspec.json.encode({"auth": f"{key.key}:{signature}"}), _JSON)

    def _lease(self, visit: Visit, socket_id: str) -> None:
        """Remembers a connection of this session. Raises ApiError if it can't have one with this id."""
        key, session = (visit.app.id, socket_id), visit.session.hash
        if _SOCKET_ID(socket_id) is None:
            raise ApiError("forbidden", "This is not a socket id.")
        if self._leases.get(key, (session, 0.0))[0] != session:
            raise ApiError("forbidden", "This connection belongs to another session.")
        if len(self._displaced) >= _MAX_LEASES:
            raise ApiError("unavailable", "Workers don't answer; try again in a moment.")
        self._leases.pop(key, None)
        self._displaced.pop(key, None)
        own = [other for other, (holder, _) in self._leases.items() if holder == session]
        if len(own) >= _MAX_LEASES_EACH:
            self._displace(own[0])
        elif len(self._leases) >= _MAX_LEASES:
            self._displace(next(iter(self._leases)))
        self._leases[key] = session, time.monotonic() + _LEASE_S
        self._check_on()

    def _check_on(self) -> None:
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check(), name="console connections")

    def _displace(self, key: tuple[str, str]) -> None:
        del self._leases[key]
        self._displaced[key] = None
        self._wake.set()

    def check_now(self) -> None:
        """Checks at once whether the sessions of open consoles still exist."""
        self._wake.set()

    async def _check(self) -> None:
        """Runs while there are leases, or connections to close."""
        while self._leases or self._displaced:
            try:
                async with asyncio.timeout(_CHECK_EVERY_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            # All at once: while a worker hangs, each takes 2 s.
            await asyncio.gather(*(self._end(key) for key in [*await self._ended(), *self._displaced]))

    async def _end_unknown(self) -> None:
        """Ends the consoles of which this process knows nothing, now and regularly: one whose signature an earlier
        process made may be opened later, and a node that died leaves its own."""
        while True:
            more = True
            while more:
                await asyncio.sleep(_CHECK_EVERY_S)
                with contextlib.suppress(Unavailable):
                    more = await self._displace_unknown()
            await asyncio.sleep(_SWEEP_EVERY_S)
            while not self._nodes.known or self._nodes.several or not self._any_watched():
                await asyncio.sleep(_SWEEP_EVERY_S)

    def _any_watched(self) -> bool:
        """Whether some app's events go to its console."""
        now_s = time.time()
        return any(app.console_until > now_s for app in self._records.apps.values())

    async def _displace_unknown(self) -> bool:
        """Returns whether there may be more of them. Raises Unavailable."""
        pages = await self._survey.ask(ListConnections("", channel=CONSOLE, limit=_MAX_FOUND))
        known = self._leases.keys() | self._displaced.keys()
        rows = [(row["app"], row["socket"]) for page in pages.values() for row in page["connections"]]
        unknown = [row for row in rows if row not in known]
        self._displaced |= dict.fromkeys(unknown)
        self._check_on()
        # Without an answer, no worker runs yet.
        return not pages or (bool(unknown) and max(len(page["connections"]) for page in pages.values()) >= _MAX_FOUND)

    async def _ended(self) -> list[tuple[str, str]]:
        """The leases whose session or time is over."""
        sessions = {session_hash for session_hash, _ in self._leases.values()}
        try:
            open_sessions = {one for one in sessions if await self._access.accounts.is_open(one)}
        except SQLAlchemyError as error:
            # No session can end meanwhile either, on any machine: that is a change of the store.
            log.warning("console sessions not checked", reason=reason_of(error))
            return []
        now = time.monotonic()
        return [
            key
            for key, (session_hash, until) in self._leases.items()
            if session_hash in sessions - open_sessions or until <= now
        ]

    async def _end(self, key: tuple[str, str]) -> None:
        """Ends the subscription of a connection, and forgets it. A signature that it has opens the channel no more. If
        a worker doesn't answer, the next round asks again."""
        app_id, socket_id = key
        lease = self._leases.get(key)
        with contextlib.suppress(Unavailable):
            await self._survey.ask(Unsubscribe(app_id, CONSOLE, "", socket_id, int(time.time()), granted=False))
            self._displaced.pop(key, None)
            if self._leases.get(key) == lease:
                self._leases.pop(key, None)

    async def finish(self) -> None:
        tasks = [task for task in (self._checking, self._ending_unknown) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def publish(self, visit: Visit) -> Response:
        """POST …/console/publish: channel, name, data. Responds with `{"fault": {field: sentence}}` or `{"trace_id"}`.

        It goes to the event log like a request to the API, in the name of the logged-in user.
        """
        app, form, request = visit.app, visit.form, visit.request
        began = time.perf_counter()
        body = msgspec.json.encode(
            {"channel": form.text("channel"), "name": form.text("name"), "data": form.raw("data")}
        )
        status, fault = 200, {}
        request.app = app
        try:
            if not app.enabled:
                raise ApiError("app_disabled", "this app is disabled")
            request.decoded = call = decode_event(body, [], app)
            await self._api.publish(request, call)
        except ApiError as error:
            field = _FIELDS.get(error.code, "data" if request.decoded is None and app.enabled else "")
            status, fault = error.status, {field: sentence(error.message)}
        except Unavailable as error:
            status, fault = 503, {"": f"Not published: {error}."}
        if self._tracer is not None:
            # For a refused request the tracer reads the event from the body.
            request.body = body
            self._tracer.ended(
                request, status, time.perf_counter() - began, f"dashboard user {visit.session.user.name}"
            )
        if fault:
            return _json(status if "" in fault else 422, {"fault": fault})
        await visit.note("publish", app, form.text("channel"), form.text("name"))
        return _json(200, {"trace_id": request.trace_id})


def _json(status: int, body: dict[str, Any]) -> Response:
    return Response(status, msgspec.json.encode(body), _JSON)
