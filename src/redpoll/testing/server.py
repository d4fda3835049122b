"""The real `redpoll serve`, with all its processes on free ports, for tests that want it (Linux).

Clients and back ends connect to a relay in front of it, which notes what is published and provokes failures. So it has
the methods of `FakeServer`, apart from those that look into the server or move its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, Self
from weakref import WeakKeyDictionary

import msgspec
from websockets.sync.client import connect

from redpoll.config.setting_table import TABLE, variable_of, without_settings
from redpoll.ipc import command_socket
from redpoll.protocol import frames
from redpoll.protocol.apps import SETTINGS, App, CurrentApp, HistoryRule, Key, parse_setting
from redpoll.protocol.auth import parse_query, sign_channel
from redpoll.protocol.effects import Join
from redpoll.protocol.errors import ApiError, Code
from redpoll.protocol.grants import AppGrants
from redpoll.protocol.limits import Limits
from redpoll.protocol.messages import Call, decode_batch, decode_event
from redpoll.protocol.session import Session
from redpoll.testing.api import MAX_REMEMBERED, ONCE_S
from redpoll.testing.expectations import Expectations
from redpoll.testing.failures import Failures
from redpoll.testing.loop_thread import LoopThread
from redpoll.testing.recorder import Published
from redpoll.testing.relay import Relay, RelayedSocket
from redpoll.testing.request import Request

__all__ = ["Server", "ServerFailed"]

_WITHIN_S: Final = 120.0
# `redpoll serve` that dies with its parent, whose id is the argument. It arms itself: Python code between fork and exec
# may hang if the parent has threads.
_SERVE: Final = """
import os, sys
from redpoll.cli import main
from redpoll.ipc.child_pipe import arm_child

arm_child()
if os.getppid() == int(sys.argv[1]):
    main(["serve"], prog_name="redpoll")
"""
_READY: Final = re.compile(r"^ready public=http://([^\s:]+):(\d+)", re.MULTILINE)
_PUBLISHES: Final = re.compile(r"(?:/api/v1)?/apps/([^/]+)/(events|batch_events)").fullmatch
# The messages that decide who a client is in a presence channel.
_IDENTIFIES: Final = ("pusher:subscribe", "pusher:unsubscribe", "pusher:signin")


class ServerFailed(RuntimeError):
    """The server didn't start, or didn't end as it should. The text has its output."""


class Server(Expectations):
    """`with Server(workers=2) as server:`. `settings` are those of `redpoll serve`, such as `activity_timeout_s=5`;
    ValueError for others."""

    def __init__(self, *, workers: int = 1, **settings: Any) -> None:
        super().__init__()
        for name in settings.keys() - {setting.name for setting in TABLE}:
            of_app = f"; it is the app's: `server.set({name}=...)` after the start" if name in SETTINGS else ""
            raise ValueError(f"`redpoll serve` has no setting {name!r}{of_app}")
        self.host, self.port = "127.0.0.1", 0
        self.app_id, self.app_key, self.app_secret = "1", "fake-key", "fake-secret"
        self._settings = {"workers": workers, "trigger_rate_per_minute": 0, "shutdown_grace_s": 0, **settings}
        self._folder = Path()
        self._process: subprocess.Popen[bytes] | None = None
        self._failures = Failures()
        # Whether the app compares correlation ids, and until when it knows each.
        self._is_idempotent = False
        self._known_ids: dict[str, float] = {}
        # Who each connection is in its presence channels.
        self._sessions: WeakKeyDictionary[RelayedSocket, Session] = WeakKeyDictionary()
        self._relay = Relay(self._failures.answer, self._answered, self._sent, self._publishes)
        self._thread = LoopThread()
        self._listener: asyncio.Server | None = None

    # -- start and stop

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the server and the relay. Raises ServerFailed."""
        # A short path: a Unix socket's has at most 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="rpt"))
        try:
            self._serve()
            self._thread.start(self._open, self._close)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends both, and deletes the server's data. Raises ServerFailed if it had to be killed. Idempotent."""
        self._thread.stop()
        process, self._process = self._process, None
        output = self._output() if process is not None else ""
        try:
            if process is not None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(_WITHIN_S)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                    raise ServerFailed(f"redpoll serve did not end within {_WITHIN_S:g} s\n{output}") from None
        finally:
            if self._folder != Path():
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = Path()

    def _serve(self) -> None:
        # Without settings of the tests' environment, such as the REDIS_URL of the application.
        environment = without_settings(os.environ)
        app = {"app_id": self.app_id, "app_key": self.app_key, "app_secret": self.app_secret}
        ports = {"host": self.host, "port": 0, "control_port": 0, "data_dir": self._folder / "data"}
        for name, value in {**app, **ports, **self._settings}.items():
            environment[variable_of(name)] = _text(value)
        self._process = self._begun(environment)
        deadline = time.monotonic() + _WITHIN_S
        while (ready := _READY.search(self._output())) is None:
            if self._process.poll() is not None:
                raise ServerFailed(f"redpoll serve ended with {self._process.returncode}\n{self._output()}")
            if time.monotonic() > deadline:
                raise ServerFailed(f"redpoll serve was not ready within {_WITHIN_S:g} s\n{self._output()}")
            time.sleep(0.01)
        self._relay.upstream = (ready[1], int(ready[2]))

    def _begun(self, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """The server's first process. The kernel kills it when the thread ends that started it, so this is one which
        lives as long, and ends if the test's process is killed."""
        begun: Future[subprocess.Popen[bytes]] = Future()

        def attend() -> None:
            try:
                with open(self._folder / "output", "wb") as output:
                    process = subprocess.Popen(
                        [sys.executable, "-c", _SERVE, str(os.getpid())],
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=environment,
                        start_new_session=True,
                    )
            except BaseException as error:
                begun.set_exception(error)
                return
            begun.set_result(process)
            process.wait()

        threading.Thread(target=attend, name="redpoll serve", daemon=True).start()
        return begun.result()

    def _output(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self._folder / "output").read_text(errors="replace")[-6_000:]
        return ""

    async def _open(self) -> None:
        self._listener = await asyncio.start_server(self._relay.serve, self.host, self.port)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            serving = asyncio.all_tasks() - {asyncio.current_task()}
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)
            self._listener = None

    # -- the app

    def new_app(self, **settings: Any) -> None:
        """From now on, `app_id`, `app_key` and `app_secret` are those of a new app; nothing is published to it yet."""
        made = self._command("app create", {"name": "test"})
        self.app_id, self.app_key, self.app_secret = str(made["id"]), made["key"], made["secret"]
        self._is_idempotent = False
        self._known_ids.clear()
        if settings:
            self.set(**settings)
        self.reset()
        # The worker that takes the next connection must know the app.
        deadline = time.monotonic() + _WITHIN_S
        while not self._is_known():
            if time.monotonic() > deadline:
                raise ServerFailed(f"the new app was not known within {_WITHIN_S:g} s\n{self._output()}")
            time.sleep(0.005)

    def _is_known(self) -> bool:
        host, port = self._relay.upstream
        with connect(f"ws://{host}:{port}/app/{self.app_key}", proxy=None) as client:
            code = json.loads(client.recv(_WITHIN_S)).get("data")
        return not (isinstance(code, dict) and code.get("code") == Code.UNKNOWN_KEY)

    def set(self, **settings: Any) -> None:
        """Changes settings of the app, as `redpoll app set` does. Raises ValueError or CommandError."""
        texts = {name: _text(value) for name, value in settings.items()}
        for name, text in texts.items():
            parse_setting(name, text)
        self._command("app set", {"id": self.app_id, "settings": texts})
        if "idempotency" in texts:
            self._is_idempotent = bool(parse_setting("idempotency", texts["idempotency"]))

    def keep_history(
        self, name: str, *, prefix: bool = True, keep: int = 100, seconds: int = 3600, **more: Any
    ) -> None:
        """Adds a history rule, as `redpoll history rule add` does. Raises CommandError with a sentence."""
        rule = {"name": name, "prefix": prefix, "keep": keep, "seconds": seconds, "replay": 0, "replay_seconds": 0}
        self._command("history rule add", {"app": self.app_id, **rule, "client_events": False, **more})

    def sign(self, socket_id: str, channel: str, channel_data: str | None = None) -> str:
        """As `FakeServer.sign`."""
        return f"{self.app_key}:{sign_channel(self.app_secret, socket_id, channel, channel_data)}"

    def _command(self, verb: str, arguments: Mapping[str, Any]) -> Any:
        return command_socket.ask(command_socket.socket_path(self._folder / "data"), verb, dict(arguments))

    # -- what tests provoke

    def fail(self, status: int, times: int = 1) -> None:
        """As `FakeServer.fail`; the server doesn't get these requests."""
        self._failures.add(status, times)

    def disconnect(self, code: int | None = Code.RECONNECT, message: str = "", *, socket_id: str | None = None) -> int:
        """As `FakeServer.disconnect`; the server sees connections that end without a close frame."""
        return self._thread.call(self._disconnect, code, message, socket_id)

    def _disconnect(self, code: int | None, message: str, socket_id: str | None) -> int:
        text = message or f"the test closed the connection with {code}"
        own = [socket for socket in self._relay.sockets if socket.app_key == self.app_key and socket.socket_id]
        sockets = [socket for socket in own if socket_id in (None, socket.socket_id)]
        for socket in sockets:
            socket.shut(code, text)
        return len(sockets)

    def reset(self) -> None:
        """Forgets what was published and what `fail` asked for."""
        self._recorder.reset()
        self._failures.reset()

    @property
    def clock(self) -> Any:
        """Raises RuntimeError: only a fake's time can be advanced."""
        raise RuntimeError("a real server's time can't be advanced; give it short times, such as activity_timeout_s=5")

    # -- what the relay reports

    def _publishes(self, request: Request) -> bool:
        place = _PUBLISHES(request.path)
        return request.method == "POST" and place is not None and place[1] == self.app_id

    def _answered(self, request: Request, status: int) -> None:
        place = _PUBLISHES(request.path)
        if status != 200 or place is None or not self._publishes(request):
            return
        # The server took it, so its form is right; the limits are the app's own.
        with contextlib.suppress(ApiError):
            call = _call(place[2], request)
            if self._is_repeat(call.correlation_id):
                return
            for name, data, channels, excluded in call.events_of():
                for channel in channels:
                    self._recorder.add(Published(name, channel, data, excluded, call.correlation_id))

    def _is_repeat(self, correlation_id: str | None) -> bool:
        """Whether the server has answered this request as it answered an earlier one, and published nothing."""
        if correlation_id is None or not self._is_idempotent:
            return False
        now = time.monotonic()
        if self._known_ids.get(correlation_id, 0.0) > now:
            return True
        if len(self._known_ids) >= MAX_REMEMBERED:
            del self._known_ids[next(iter(self._known_ids))]
        self._known_ids[correlation_id] = now + ONCE_S
        return False

    def _sent(self, message: bytes, socket: RelayedSocket) -> None:
        """Notes a client event; one that the server refuses, too. Clients of an earlier app may still be there."""
        if socket.app_key != self.app_key:
            return
        with contextlib.suppress(Exception):
            parsed = frames.decode_message(message)
            if parsed.event in _IDENTIFIES and socket.socket_id:
                self._follow(message, socket)
            elif parsed.event.startswith("client-"):
                channel, text = str(parsed.channel), frames.text_of(parsed.data)
                user_id = self._user_id(socket, channel)
                self._recorder.add(Published(parsed.event, channel, text, sender=socket.socket_id, user_id=user_id))

    def _follow(self, message: bytes, socket: RelayedSocket) -> None:
        """Gives the message to a session of our own. Here every subscribe with a right signature or grant succeeds."""
        session = self._sessions.get(socket)
        if session is None:
            key = Key(key=self.app_key, secret=self.app_secret)
            app = msgspec.structs.replace(_ANY_APP, id=self.app_id, keys=(key,))
            first, _, second = socket.socket_id.partition(".")
            session = Session((int(first), int(second)), CurrentApp(app, AppGrants(time.time)), _ANY_NUMBER)
            self._sessions[socket] = session
        for effect in session.receive(message, time.monotonic()):
            if isinstance(effect, Join):
                session.joined(effect.channel)

    def _user_id(self, socket: RelayedSocket, channel: str) -> str | None:
        session = self._sessions.get(socket)
        subscription = session.channels.get(channel) if session is not None else None
        return None if subscription is None else subscription.user_id


# Takes whatever an app can be set to take.
_ANY_APP: Final = App(
    id="",
    name="",
    keys=(),
    max_event_name_chars=1_000,
    max_channels=1_000,
    max_data_bytes=262_144,
    max_batch=1_000,
    max_user_info_bytes=16_384,
    grants=True,
    # Only a channel with history takes an event with `end`.
    history=(HistoryRule(id="000001", name="", prefix=True, keep=1, seconds=1),),
)
_ANY_NUMBER: Final = Limits(max_channels=1_000_000, subscribes_per_s=0.0)


def _call(endpoint: str, request: Request) -> Call:
    if endpoint == "batch_events":
        return decode_batch(request.body, _ANY_APP)
    return decode_event(request.body, parse_query(request.query), _ANY_APP)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
