"""`redpoll debug`: what the control plane writes about requests of an app that is being debugged, and the commands that
begin, show and end it."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any, Final

import hiredis
import msgspec

from redpoll.cluster.bus import Unavailable
from redpoll.cluster.debug_log import MAX_LINES, DebugLog, debug_text
from redpoll.cluster.questions import ListConnections
from redpoll.cluster.redis.link import LinkDown
from redpoll.control.http.router import Access, Place
from redpoll.ipc.command_socket import CommandError
from redpoll.store.audit import COMMAND_LINE

if TYPE_CHECKING:
    from redpoll.control.commands.context import Cluster, Context
    from redpoll.control.http.request import Request
    from redpoll.control.http.response import Response
    from redpoll.protocol.apps import App

__all__ = ["COMMANDS", "MAX_DEBUG_S", "ControlDebugging", "is_debugged"]

MAX_DEBUG_S: Final = 86_400
_MAX_LINES_PER_READ: Final = 500
# The stream outlives the end, for readers that are late.
_KEPT_S: Final = 60
_SOCKET_ID: Final = re.compile(r"[0-9]{1,19}\.[0-9]{1,19}").fullmatch
# Of a query, the values that aren't logged.
_SECRET_PARAMS: Final = re.compile(r"((?:auth_signature|body_md5|token)=)[^&\\\"]*", re.IGNORECASE)

_DASHBOARD: Final = "/dashboard/"


class ControlDebugging(DebugLog):
    """The control plane's lines: each HTTP request of an app, with its answer."""

    def request(self, request: Request, response: Response, took_s: float) -> None:
        """A request of an app was answered. If one connection is being debugged, only requests that name it count."""
        if not _is_of_an_app(request):
            return
        app_id = request.app.id if request.caller_known else (request.parameters or ("",))[0]
        chosen = self.socket_of(app_id)
        if chosen is None or (chosen and not (chosen.encode() in request.body or chosen in request.query)):
            return
        fields: dict[str, Any] = {
            "method": request.method,
            "path": request.path,
            "status": response.status,
            "ms": round(took_s * 1_000, 2),
            "address": request.remote,
            "trace": request.found_trace_id or request.trace_id,
        }
        if request.query:
            fields["query"] = debug_text(_SECRET_PARAMS.sub(r"\1…", request.query))
        if request.body and request.route.pattern:
            # Without a route, it may be one of the management API.
            fields["body"] = debug_text(request.body)
        if response.status >= 400:
            # Answers with a lower status may contain secrets.
            # One for a wrong signature repeats the query.
            fields["answer"] = _SECRET_PARAMS.sub(r"\1…", debug_text(response.body))
        self.line(app_id, chosen, "request answered", **fields)


def _is_of_an_app(request: Request) -> bool:
    """False for requests of the dashboard and of the management API: their bodies and queries may contain secrets."""
    route = request.route
    if route.access in (Access.SESSION, Access.MANAGE) or route.place is not Place.PUBLIC:
        return False
    # A request that was refused for its method or host name has no route, but the parameters of its path.
    return not request.path.startswith(_DASHBOARD)


def is_debugged(app: App) -> bool:
    """Whether the app, or one of its connections, is being debugged now."""
    return app.debug_until > time.time()


def _shape(app: App) -> dict[str, Any]:
    return {"app": app.id, "name": app.name, "socket": app.debug_socket, "until": app.debug_until}


async def _start(context: Context, args: dict[str, Any]) -> Any:
    cluster = context.running("debugging")
    socket_id, for_s = args["socket"], min(args["for_s"], MAX_DEBUG_S)
    if socket_id and _SOCKET_ID(socket_id) is None:
        raise CommandError(f"{socket_id!r} is no socket id: expected two numbers with a dot between, as 123.456")
    app_id = args["app"] or await _app_of(cluster, socket_id)
    if app_id not in context.records.apps:
        raise CommandError(f"there is no app with the id {app_id}")
    until = time.time() + for_s
    key = cluster.keys.debug(app_id)
    first = msgspec.json.encode({"time_ms": int(time.time() * 1_000), "what": "debugging began"})
    try:
        position = await cluster.link.ask(b"XADD", key, b"MAXLEN", b"~", MAX_LINES, b"*", b"line", first)
        await cluster.link.ask(b"EXPIRE", key, int(for_s) + _KEPT_S)
    except (LinkDown, hiredis.ReplyError) as error:
        raise Unavailable(str(error)) from error
    app = await context.records.debug(app_id, until, socket_id, by=COMMAND_LINE)
    return _shape(app) | {"position": position.decode()}


async def _app_of(cluster: Cluster, socket_id: str) -> str:
    """The app of a connection, whichever worker has it."""
    answers = await cluster.survey.ask(ListConnections("", socket_id, limit=10))
    for page in answers.values():
        for row in page["connections"]:
            if row["socket"] == socket_id:
                return str(row["app"])
    raise CommandError(f"there is no connection with the socket id {socket_id}")


async def _list(context: Context, _args: dict[str, Any]) -> Any:
    return [_shape(app) for app in context.records.apps.values() if is_debugged(app)]


async def _show(context: Context, args: dict[str, Any]) -> Any:
    cluster = context.running("debugging")
    app = context.records.apps.get(args["app"])
    begin = f"({args['after']}"
    try:
        entries = await cluster.link.ask(
            b"XRANGE", cluster.keys.debug(args["app"]), begin, b"+", b"COUNT", _MAX_LINES_PER_READ
        )
    except (LinkDown, hiredis.ReplyError) as error:
        raise Unavailable(str(error)) from error
    return {
        "lines": [msgspec.json.decode(fields[1]) for _, fields in entries],
        "position": entries[-1][0].decode() if entries else args["after"],
        "until": app.debug_until if app is not None else 0,
    }


async def _stop(context: Context, args: dict[str, Any]) -> Any:
    debugged = [app for app in context.records.apps.values() if is_debugged(app) and args["app"] in ("", app.id)]
    for app in debugged:
        await context.records.debug(app.id, 0.0, "", by=COMMAND_LINE)
    return [_shape(app) for app in debugged]


COMMANDS: Final = {
    # {app or "", socket or "", for_s} -> {app, name, socket, until, position}
    "debug start": _start,
    "debug list": _list,  # {} -> [{app, name, socket, until}]
    "debug show": _show,  # {app, after: position} -> {lines, position, until}; the lines that came after the position
    "debug stop": _stop,  # {app or "" for all} -> [{app, name, socket, until}]
}
