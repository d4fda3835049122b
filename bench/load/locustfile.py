"""Locust: users that subscribe over WebSocket and users that publish over HTTP, against any Pusher-compatible server.

    PUSHER_URL=http://KEY:SECRET@HOST:PORT/apps/ID locust -f bench/load/locustfile.py --headless -u 200 -r 50 -t 30s
    PUSHER_URL=… locust -f bench/load/locustfile.py            the web page at http://127.0.0.1:8089

`subscribe` is the time from connect to the subscription's success, `event` the time from publishing an event to its
arrival at one subscriber (both times are from this machine's clock), `publish` that of the HTTP request.
LOCUST_PUBLISHERS (2), LOCUST_CHANNELS (10) and LOCUST_RATE (5 events/s for each publisher) change the mix. Locust takes
much processor time per message: for more than a thousand per second use bench/load/swarm.py, and for the highest rates
the C client of bench/load/end_to_end.py.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import random
import time
import urllib.parse

import gevent
import websocket
from locust import HttpUser, User, constant_throughput, task

URL = urllib.parse.urlsplit(os.environ.get("PUSHER_URL", "http://app-key:app-secret@127.0.0.1:6001/apps/app-id"))
APP_ID = URL.path.rpartition("/")[2]
KEY, SECRET = URL.username or "", URL.password or ""
HOST = f"{URL.hostname}:{URL.port or 80}"
CHANNELS = int(os.environ.get("LOCUST_CHANNELS", "10"))
PUBLISHERS = int(os.environ.get("LOCUST_PUBLISHERS", "2"))
RATE = float(os.environ.get("LOCUST_RATE", "5"))
EVENT = "locust-event"
PING_EVERY_S = 30.0


def digest(text: str) -> str:
    return hmac.new(SECRET.encode(), text.encode(), hashlib.sha256).hexdigest()


class Subscriber(User):
    """One connection in one private channel. Every event that arrives is a row of the statistics."""

    host = f"http://{HOST}"

    def on_start(self) -> None:
        channel = f"private-locust-{random.randrange(CHANNELS)}"
        began = time.perf_counter()
        error: Exception | None = None
        try:
            self.socket = websocket.create_connection(f"ws://{HOST}/app/{KEY}?protocol=7&client=locust", timeout=30)
            established = json.loads(json.loads(self.socket.recv())["data"])
            signature = digest(f"{established['socket_id']}:{channel}")
            data = {"channel": channel, "auth": f"{KEY}:{signature}"}
            self.socket.send(json.dumps({"event": "pusher:subscribe", "data": data}))
            answer = json.loads(self.socket.recv())
            if answer["event"] != "pusher_internal:subscription_succeeded":
                raise ConnectionError(f"subscribe was answered {answer}")
            # In a quiet channel only the answers to pings come.
            self.socket.settimeout(3 * PING_EVERY_S)
        except Exception as raised:  # Any error counts as a failure of this user.
            error = raised
        self._note("WS", "subscribe", time.perf_counter() - began, 0, error)
        if error is None:
            self.reader = gevent.spawn(self._read)

    def on_stop(self) -> None:
        if hasattr(self, "reader"):
            self.reader.kill()
            self.socket.close()

    def _note(self, kind: str, name: str, seconds: float, size: int, error: Exception | None = None) -> None:
        self.environment.events.request.fire(
            request_type=kind,
            name=name,
            response_time=seconds * 1000,
            response_length=size,
            exception=error,
            context={},
        )

    def _read(self) -> None:
        try:
            while text := self.socket.recv():
                message = json.loads(text)
                if message["event"] == EVENT:
                    self._note("WS", "event", time.time() - json.loads(message["data"])["sent"], len(text))
                elif message["event"] == "pusher:ping":
                    self.socket.send('{"event":"pusher:pong","data":{}}')
            raise ConnectionError("the server closed the connection")
        except (OSError, ValueError, websocket.WebSocketException) as error:
            self._note("WS", "connection", 0.0, 0, error)

    @task
    def stay(self) -> None:
        gevent.sleep(PING_EVERY_S)
        if hasattr(self, "reader") and not self.reader.dead:
            self.socket.send('{"event":"pusher:ping","data":{}}')


class Publisher(HttpUser):
    """Publishes small events at a steady rate, signed as every Pusher server library does."""

    host = f"http://{HOST}"
    fixed_count = PUBLISHERS
    wait_time = constant_throughput(RATE)

    @task
    def publish(self) -> None:
        channel = f"private-locust-{random.randrange(CHANNELS)}"
        data = json.dumps({"sent": time.time(), "text": "x" * 80})
        body = json.dumps({"name": EVENT, "channels": [channel], "data": data}).encode()
        query = (
            f"auth_key={KEY}&auth_timestamp={int(time.time())}&auth_version=1.0"
            f"&body_md5={hashlib.md5(body).hexdigest()}"
        )
        path = f"/apps/{APP_ID}/events"
        signature = digest(f"POST\n{path}\n{query}")
        headers = {"Content-Type": "application/json"}
        self.client.post(f"{path}?{query}&auth_signature={signature}", data=body, headers=headers, name="publish")
