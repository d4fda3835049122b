"""The operator's commands: one table of verbs, and the Unix socket that takes them (command_socket.py).

Commands run in the process that has the record store open. While a server runs, that is its control plane: the command
line sends one line of JSON `{"verb", "args"}` to `control.sock` in the data folder and gets one line `{"result"}` or
`{"error"}`. If no server runs, the command line opens the store and runs the command itself.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import hiredis
import msgspec
import structlog
from sqlalchemy.exc import SQLAlchemyError

from redpoll.cluster.bus import Unavailable
from redpoll.cluster.nodes import UNDRAINED
from redpoll.cluster.questions import CloseSocket, ListConnections
from redpoll.cluster.redis.link import LinkDown
from redpoll.cluster.redis.scripts import WRITE
from redpoll.cluster.survey import Survey
from redpoll.control.api.history import ChannelHistory
from redpoll.control.commands import app_apply, app_import, app_write
from redpoll.control.commands import grants as grant_commands
from redpoll.control.commands import users as user_commands
from redpoll.control.commands import webhooks as webhook_commands
from redpoll.control.commands.context import Cluster, Context
from redpoll.control.nodes.balance import balance
from redpoll.control.observe import debugging
from redpoll.control.observe.usage import first_day
from redpoll.control.records.records import RecordError
from redpoll.ipc.command_socket import Answer, CommandError, decode_command, encode, socket_address
from redpoll.loop.ending import finish_tasks
from redpoll.loop.turns import TooManyWaiting
from redpoll.protocol.apps import SETTINGS, App, HistoryRule, Key, parse_setting
from redpoll.protocol.errors import ApiError
from redpoll.protocol.tokens import Token
from redpoll.store.audit import COMMAND_LINE
from redpoll.store.charts import FIRST, Charts, Day, Position
from redpoll.store.errors import reason_of

__all__ = ["COMMANDS", "app_shape", "run", "serve_commands"]

log = structlog.get_logger()

# A worker lists at most this many (worker/connection_list.py).
_MAX_CONNECTIONS = 500
# Days of a page of `usage` without a server. Each page opens the record store, and no clients wait: so pages are large.
_MAX_DAYS_HERE: Final = 100_000
_REDIS_ANSWERS_WITHIN_S: Final = 2.0
# A file of `redpoll apply` has at most 16 MiB, and somewhat more as JSON.
_MAX_REQUEST_BYTES = 32 << 20
_FINISH_WITHIN_S: Final = 0.5


def app_shape(app: App) -> dict[str, Any]:
    """An app as commands print it: `{id, name, key, secret, keys}`.

    `key` and `secret` are those of the oldest enabled key, null without one. `keys` is a list of `{key, secret,
    enabled}`.
    """
    signing = app.signing_key()
    return {
        "id": app.id,
        "name": app.name,
        "key": signing.key if signing else None,
        "secret": signing.secret if signing else None,
        "keys": [key_shape(key) for key in app.keys],
    }


def key_shape(key: Key) -> dict[str, Any]:
    return {"key": key.key, "secret": key.secret, "enabled": key.enabled}


def settings_shape(app: App) -> dict[str, Any]:
    """Every setting of an app that `app set` may change, with its value."""
    return {"id": app.id, "settings": {name: getattr(app, name) for name in SETTINGS}}


def token_shape(token: Token) -> dict[str, Any]:
    """A token as commands print it: without its plain form, which isn't stored. Times are Unix seconds, or null."""
    return {
        "id": token.id,
        "name": token.name,
        "prefix": token.prefix,
        "scopes": token.scopes,
        "created_at": _whole(token.created_at),
        "expires_at": _whole(token.expires_at),
        "last_used_at": _whole(token.last_used_at),
        "revoked_at": _whole(token.revoked_at),
    }


def rule_shape(rule: HistoryRule) -> dict[str, Any]:
    """A history rule with all its fields (protocol.apps.HistoryRule) except the internal `era`."""
    return {name: value for name, value in msgspec.structs.asdict(rule).items() if name != "era"}


def _whole(at_s: float | None) -> int | None:
    return None if at_s is None else int(at_s)


async def _server_show(context: Context, _args: dict[str, Any]) -> Any:
    context.running("this command, without --url,")
    settings = context.settings
    return {
        "host": settings.host,
        "port": settings.port,
        "tls_port": settings.tls_port,
        "control_host": settings.control_host,
        "control_port": settings.control_port,
        "control_tls": bool(settings.tls_client_ca),
        "proxy_protocol": settings.proxy_protocol,
    }


async def _server_health(context: Context, _args: dict[str, Any]) -> Any:
    return {"obstacle": context.running("this command").health.obstacle()}


async def _server_reload(context: Context, _args: dict[str, Any]) -> Any:
    context.running("a reload")
    assert context.reload is not None
    return await context.reload()


async def _server_restore(context: Context, args: dict[str, Any]) -> Any:
    context.running("restoring into a running server")
    assert context.restore is not None
    if context.store.shared:
        raise CommandError("the records are in PostgreSQL: restore them with pg_restore, with all servers stopped")
    try:
        context.restore(Path(args["file"]))
    except OSError as error:
        raise CommandError(f"{args['file']} can't be put in place: {error}") from error
    return {}


async def _app_create(context: Context, args: dict[str, Any]) -> Any:
    return app_shape(await context.records.create_app(args["name"], by=COMMAND_LINE))


async def _app_list(context: Context, _args: dict[str, Any]) -> Any:
    # As after a restart; a new app is the last in `apps`.
    return [app_shape(app) for _, app in sorted(context.records.apps.items())]


async def _app_show(context: Context, args: dict[str, Any]) -> Any:
    return app_shape(_app(context, args["id"]))


async def _app_set(context: Context, args: dict[str, Any]) -> Any:
    values, faults = {}, []
    for name, text in args["settings"].items():
        try:
            values[name] = parse_setting(name, text)
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise CommandError("\n".join(faults))
    return settings_shape(await context.records.set_app(args["id"], values, by=COMMAND_LINE))


async def _key_add(context: Context, args: dict[str, Any]) -> Any:
    made = await context.records.add_key(args["app"], args["key"], by=COMMAND_LINE)
    return {"key": made.key, "secret": made.secret}


async def _key_list(context: Context, args: dict[str, Any]) -> Any:
    return app_shape(_app(context, args["app"]))["keys"]


async def _key_disable(context: Context, args: dict[str, Any]) -> Any:
    return key_shape(await context.records.disable_key(args["app"], args["key"], by=COMMAND_LINE))


async def _token_create(context: Context, args: dict[str, Any]) -> Any:
    token, plain = await context.records.create_token(
        args["app"], args["name"], args["scopes"], args["lasts_s"], by=COMMAND_LINE
    )
    return {
        "id": token.id,
        "token": plain,
        "name": token.name,
        "scopes": token.scopes,
        "expires_at": _whole(token.expires_at),
    }


async def _token_list(context: Context, args: dict[str, Any]) -> Any:
    return [token_shape(token) for token in context.records.tokens_of(args["app"])]


async def _token_revoke(context: Context, args: dict[str, Any]) -> Any:
    return [token_shape(token) for token in await context.records.revoke_tokens(args["ids"], by=COMMAND_LINE)]


async def _rule_add(context: Context, args: dict[str, Any]) -> Any:
    rule = msgspec.convert({**_fields_of_rule(args), "id": ""}, HistoryRule)
    return rule_shape(await context.records.add_history_rule(args["app"], rule, by=COMMAND_LINE))


def _fields_of_rule(args: dict[str, Any]) -> dict[str, Any]:
    return {name: args[name] for name in HistoryRule.__struct_fields__ if name in args}


async def _rule_list(context: Context, args: dict[str, Any]) -> Any:
    return [rule_shape(rule) for rule in _app(context, args["app"]).history]


async def _rule_remove(context: Context, args: dict[str, Any]) -> Any:
    return rule_shape(await context.records.remove_history_rule(args["app"], args["rule"], by=COMMAND_LINE))


async def _history_show(context: Context, args: dict[str, Any]) -> Any:
    app = _app(context, args["app"])
    history = ChannelHistory(context.running("the history of a channel").history)
    return msgspec.to_builtins(await history.page(app.id, args["channel"], args["query"]))


async def _history_clear(context: Context, args: dict[str, Any]) -> Any:
    app = _app(context, args["app"])
    history = ChannelHistory(context.running("clearing a history").history)
    epoch = await history.clear(app.id, args["channel"])
    await context.note("history clear", app.id, args["channel"])
    return {"epoch": epoch}


async def _connections_list(context: Context, args: dict[str, Any]) -> Any:
    app = _app(context, args["app"])
    question = ListConnections(app.id, args["find"], args["channel"], args["limit"])
    pages = await _survey(context).ask(question)
    rows = [connection for page in pages.values() for connection in page["connections"]]
    rows.sort(key=lambda row: row["since"], reverse=True)
    return {"total": sum(page["total"] for page in pages.values()), "connections": rows[: args["limit"]]}


async def _connections_show(context: Context, args: dict[str, Any]) -> Any:
    about = {"app": args["app"], "find": args["id"], "channel": "", "limit": _MAX_CONNECTIONS}
    for row in (await _connections_list(context, about))["connections"]:
        if row["socket"] == args["id"]:
            return row
    raise CommandError(f"this app has no connection with the socket id {args['id']}")


async def _usage(context: Context, args: dict[str, Any]) -> Any:
    app_id = _app(context, args["app"]).id if args["app"] else ""
    after = FIRST if args["after"] is None else msgspec.convert(args["after"], Position)
    if context.usage is not None:
        days, missing, following = await context.usage.find(app_id, args["days"], after)
    else:
        days, following = await _usage_here(context, app_id, args["days"], after)
        missing = []
    shown = [day._asdict() for day in days if day.app_id in context.records.apps]
    return {"days": shown, "unanswered": missing, "next": following}


async def _usage_here(context: Context, app_id: str, days: int, after: Position) -> tuple[list[Day], Position | None]:
    charts = await Charts.open(Path(context.settings.data_dir) / "charts.sqlite")
    try:
        since = first_day(time.time(), days)
        page = await charts.days(since, app_id or None, after=after, limit=_MAX_DAYS_HERE)
    finally:
        await charts.close()
    return page, page[-1][:2] if len(page) == _MAX_DAYS_HERE else None


async def _connections_kick(context: Context, args: dict[str, Any]) -> Any:
    app = _app(context, args["app"])
    answers = await _survey(context).ask(CloseSocket(app.id, args["id"]))
    if not sum(answers.values()):
        raise CommandError(f"this app has no connection with the socket id {args['id']}")
    await context.note("connections kick", app.id, args["id"])
    return {"socket": args["id"]}


async def _node_list(context: Context, args: dict[str, Any]) -> Any:
    rows = await context.running("the list of nodes").nodes.rows()
    return [msgspec.structs.asdict(row) for row in rows]


async def _node_drain(context: Context, args: dict[str, Any]) -> Any:
    cluster, run = _live_node(context, args["name"])
    await _put_drained(cluster, run, f"{args['within_s']:g}")
    await context.note("node drain", target=args["name"], detail=f"within {args['within_s']:g} s")
    return {"name": args["name"], "draining": True}


async def _node_undrain(context: Context, args: dict[str, Any]) -> Any:
    cluster, run = _live_node(context, args["name"])
    await _put_drained(cluster, run, UNDRAINED)
    await context.note("node undrain", target=args["name"])
    return {"name": args["name"], "draining": False}


async def _balance(context: Context, args: dict[str, Any]) -> Any:
    nodes = context.running("balancing connections").nodes.view
    done = await balance(_survey(context), nodes, args["within_s"])
    await context.note("balance", detail=f"within {args['within_s']:g} s")
    return done


def _live_node(context: Context, name: str) -> tuple[Cluster, str]:
    cluster = context.running("draining a node")
    run = cluster.nodes.view.live_run(name)
    if run is None:
        raise CommandError(f"there is no live node with the name {name}; `redpoll node list` shows all")
    return cluster, run


async def _put_drained(cluster: Cluster, run: str, entry: bytes | str) -> None:
    try:
        async with asyncio.timeout(_REDIS_ANSWERS_WITHIN_S):
            await cluster.link.execute(WRITE, (cluster.keys.drained,), (b"HSET", run, entry))
    except (LinkDown, hiredis.ReplyError, TimeoutError) as error:
        raise Unavailable(str(error) or f"no answer within {_REDIS_ANSWERS_WITHIN_S:g} s") from error


def _survey(context: Context) -> Survey:
    return context.running("the list of connections").survey


def _app(context: Context, app_id: str) -> App:
    app = context.records.apps.get(app_id)
    if app is None:
        raise CommandError(f"there is no app with the id {app_id}")
    return app


COMMANDS: dict[str, Callable[[Context, dict[str, Any]], Awaitable[Any]]] = {
    # {} -> {host, port, tls_port, control_host, control_port, control_tls, proxy_protocol}
    "server show": _server_show,
    "server health": _server_health,  # {} -> {obstacle: why it isn't ready, or null}
    # {} -> {faults, applied: {name: value}, restart: [name], certificate: bool}
    "server reload": _server_reload,
    # {file: a checked record store in the data folder} -> {}; this process ends, and the next one has these records
    "server restore": _server_restore,
    "app create": _app_create,  # {name} -> app
    "app list": _app_list,  # {} -> [app]
    "app show": _app_show,  # {id} -> app
    "app set": _app_set,  # {id, settings: {name: text}} -> {id, settings: {name: value}}, all of them
    "key add": _key_add,  # {app, key or null} -> {key, secret}
    "key list": _key_list,  # {app} -> [key]
    "key disable": _key_disable,  # {app, key} -> key
    # {app or null: for the management, name, scopes, lasts_s or null} -> {id, token, name, scopes, expires_at}
    "token create": _token_create,
    "token list": _token_list,  # {app or null} -> [token]
    "token revoke": _token_revoke,  # {ids} -> [token]
    "history rule add": _rule_add,  # {app, …the fields of HistoryRule but id} -> rule
    "history rule list": _rule_list,  # {app} -> [rule]
    "history rule remove": _rule_remove,  # {app, rule} -> rule
    "history show": _history_show,  # {app, channel, query: {name: text}} -> {epoch, messages, next}, as over HTTP
    "history clear": _history_clear,  # {app, channel} -> {epoch}
    "connections list": _connections_list,  # {app, find, channel, limit} -> {total, connections}, newest first
    "connections show": _connections_show,  # {app, id: socket id} -> connection (worker/connection_list.py)
    "connections kick": _connections_kick,  # {app, id} -> {socket}
    # {app or "", days, after: null or `next`} -> {days: [{app_id, day, …the fields of store.charts.Day}],
    # unanswered: [node], next: null or [app_id, day]}: a page, by app and day. Without a server only of this node.
    "usage": _usage,
    **app_import.COMMANDS,
    **app_apply.COMMANDS,
    **app_write.COMMANDS,
    **debugging.COMMANDS,
    "node drain": _node_drain,  # {name, within_s} -> {name, draining}
    "node undrain": _node_undrain,  # {name} -> {name, draining}
    "balance": _balance,  # {within_s} -> {moved: connections, within_s}
    "node list": _node_list,  # {} -> [NodeRow (control/nodes/nodes.py)]
    **webhook_commands.COMMANDS,
    **user_commands.COMMANDS,
    **grant_commands.COMMANDS,
}


async def run(context: Context, verb: str, args: dict[str, Any]) -> Any:
    """Carries out one command. If it changed records, all workers know them when it returns. Raises CommandError."""
    if verb not in COMMANDS:
        raise CommandError(f"the running server doesn't know the command {verb!r}; is it another version?")
    before = context.records.directory
    try:
        result = await COMMANDS[verb](context, args)
        if context.cluster is not None and context.records.directory != before:
            await context.cluster.spreading.wait()
        return result
    except RecordError as error:
        raise CommandError(str(error)) from error
    except ApiError as error:
        raise CommandError(error.message) from error
    except TooManyWaiting as error:
        raise CommandError(str(error)) from error
    except Unavailable as error:
        raise CommandError(f"Redis is not available: {error}") from error
    except SQLAlchemyError as error:
        raise CommandError(f"the record store failed: {reason_of(error)}") from error


@contextlib.asynccontextmanager
async def serve_commands(context: Context, path: str | Path) -> AsyncIterator[None]:
    """Takes commands on a Unix socket (mode 0600) inside the block. Those that run at its end get half a second
    and are then cancelled.

    The caller holds the lock of the data folder, so an existing socket belongs to a dead server and is removed.
    """
    path = Path(path)
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX)
    with socket_address(path) as address:
        listening.bind(address)
    os.chmod(path, 0o600)

    running: set[asyncio.Task[Any]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            command = decode_command(await reader.readline())
            running.add(task)
            task.add_done_callback(running.discard)
            reply = Answer(await run(context, command.verb, command.args))
        except CommandError as error:
            reply = Answer(error=str(error))
        except (ValueError, KeyError, msgspec.MsgspecError) as error:
            reply = Answer(error=f"not a command: {error}")
        except Exception:
            log.exception("command failed")
            reply = Answer(error="the server failed; its log says why")
        with contextlib.suppress(ConnectionError):
            writer.write(encode(reply))
            await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, sock=listening, limit=_MAX_REQUEST_BYTES)
    try:
        yield
    finally:
        server.close()
        await finish_tasks(running, _FINISH_WITHIN_S)
