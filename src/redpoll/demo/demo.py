"""`redpoll demo`: starts the server and the back end, and runs until Ctrl-C."""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Iterator
from typing import Final, NamedTuple
from urllib.parse import quote

from aiohttp import web

from redpoll.demo.backend import Account, Backend, listen
from redpoll.demo.page import page_files
from redpoll.demo.server import KEEP, KEEP_S, RULES, STOPS, OwnServer, ServerError
from redpoll.host.welcome import url_host

__all__ = ["DemoError", "Running", "run"]

_NAMES: Final = {"worker": "worker", "redis": "Redis"}


class DemoError(Exception):
    """The demo did not start. The text is a sentence for the person who started it."""


class _Stopped(BaseException):
    """A signal came while the server started."""


class Running(NamedTuple):
    """A demo that runs: the page's address, the app's (with its secret), and of the demo's own server the dashboard's
    address and the password of its user admin, else None. `rules` are the commands that give a running server's app
    its history; `publish` is a command that publishes."""

    page: str
    app: str
    dashboard: str | None
    password: str | None
    publish: str
    rules: list[str]


def run(account: Account | None, host: str, port: int, started: Callable[[Running], None]) -> None:
    """Runs the demo until SIGINT, SIGTERM or SIGHUP. Raises DemoError.

    `account` is an app of a running server; None starts a server. `host` and `port` are the page's, 0 for a free port.
    `started` is called once, in a thread, when the page can be opened.
    """
    with contextlib.suppress(_Stopped), _stops():
        if account is not None:
            asyncio.run(_serve(account, None, host, port, started))
            return
        try:
            with OwnServer(host) as server:
                asyncio.run(_serve(server.account, server, host, port, started))
        except ServerError as error:
            raise DemoError(str(error)) from error


@contextlib.contextmanager
def _stops() -> Iterator[None]:
    """Ends the block at one of the signals, so that what it started is stopped."""

    def stop(_number: int, _frame: object) -> None:
        raise _Stopped

    before = {number: signal.signal(number, stop) for number in STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _serve(
    account: Account, server: OwnServer | None, host: str, port: int, started: Callable[[Running], None]
) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in STOPS:
        loop.add_signal_handler(number, stopped.set)
    app = f"http{'s' if account.secure else ''}://{account.key}:{quote(account.secret, safe='')}@"
    app += f"{url_host(account.host)}:{account.port}{account.prefix}/apps/{account.app_id}"
    publish = 'redpoll publish demo-text word \'{"word":"Hello! "}\''
    files = page_files(
        server=f"{url_host(account.host)}:{account.port}",
        can_kill=server is not None,
        # The page shows no secret of a server that isn't its own.
        publish=f"{publish} --url {app}" if server is not None else publish,
    )
    application = Backend(account, files, host=host).application()
    if server is not None:
        application.router.add_post("/kill", _killing(server))
    try:
        runner, port = await listen(application, host, port)
    except OSError as error:
        raise DemoError(f"can't listen on {host} port {port}: {error.strerror}") from error
    try:
        running = Running(
            page=f"http://{url_host(host)}:{port}/",
            app=app,
            dashboard=server.control_url if server is not None else None,
            password=server.password if server is not None else None,
            publish=f"{publish} --url {app}",
            rules=[] if server is not None else [_rule(account.app_id, *rule) for rule in RULES],
        )
        await asyncio.to_thread(started, running)
        await stopped.wait()
    finally:
        await runner.cleanup()


def _rule(app_id: str, channel: str, replay: int) -> str:
    words = f"redpoll history rule add {app_id} --channel {channel} --keep {KEEP} --seconds {KEEP_S}"
    return f"{words} --replay {replay}" if replay else words


def _killing(server: OwnServer) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def kill(request: web.Request) -> web.Response:
        what = str((await request.post()).get("what", ""))
        if what not in ("worker", "redis"):
            raise web.HTTPBadRequest(text="what must be worker or redis")
        pid = await asyncio.to_thread(server.kill, what)  # type: ignore[arg-type]
        if pid is None:
            raise web.HTTPServiceUnavailable(text=f"{_NAMES[what]} is being started again; try later".capitalize())
        return web.Response(text=f"kill -9 {pid}: {'a worker' if what == 'worker' else 'Redis'} is dead")

    return kill
