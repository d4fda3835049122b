"""A schedule on a fake clock, with a store, endpoints and deliveries of its own. Not a test."""

import asyncio
import json
import time

from control.webhooks.transitions import APP
from redpoll.control.webhooks.endpoints import Endpoints
from redpoll.control.webhooks.schedule import Schedule
from redpoll.control.webhooks.sender import Sender
from redpoll.store import deliveries as delivery_rows

RETRIES = (10.0, 60.0, 300.0)


class World:
    """A schedule with its store, endpoints and deliveries."""

    def __init__(self, store, records, clock, retries=RETRIES):
        self.retries = retries
        self.store, self.records, self.clock = store, records, clock
        # Tests count the attempts at receivers that hang. None may end because the machine is slow.
        self.sender = Sender(allow_http=True, allow_addresses=("127.0.0.0/8",), timeout_s=600.0)
        self.endpoints = Endpoints(store, records, lambda: self.sender, clock, self.changed)
        self.schedule = None
        self.count = 0
        self.running = None

    def start(self):
        self.schedule = Schedule(
            self.store, self.endpoints, self.sender, self.retries, self.signing_key, self.clock, self.clock.steady
        )
        self.running = asyncio.create_task(self.schedule.run())

    def changed(self, endpoint):
        if self.schedule is not None:
            self.schedule.endpoint_changed(endpoint.id)

    def signing_key(self, app_id):
        return self.records.apps[app_id].signing_key()

    async def end(self, within_s=60.0):
        if self.running is not None:
            self.running.cancel()
            await asyncio.gather(self.running, return_exceptions=True)
            await self.schedule.finish(within_s)
        self.running = None

    async def endpoint(self, url, **more):
        return await self.endpoints.create(APP, url, **more)

    def body(self, channel):
        return json.dumps({"n": self.count}).encode()

    async def put(self, endpoint, *channels, event="channel.occupied", user=None, add=True):
        """Adds one delivery per channel and returns their ids."""
        rows = []
        for channel in channels:
            self.count += 1
            rows.append(
                {
                    "id": f"d{self.count}",
                    "endpoint_id": endpoint.id,
                    "event": event,
                    "channel": channel,
                    "user": user,
                    "stamp": self.count,
                    "time_ms": 0,
                    "trace": None,
                    "body": self.body(channel),
                    "at": self.clock(),
                    "created_at": self.clock(),
                }
            )
        async with self.store.change() as connection:
            written = await delivery_rows.add(connection, rows)
        if add:
            self.schedule.add(written)
        return [row["id"] for row in rows]

    async def read(self, delivery_id):
        async with self.store.reading() as connection:
            found = await delivery_rows.find_by_id(connection, delivery_id)
            return found, await delivery_rows.attempts_at(connection, found.number)

    async def wait_state(self, delivery_id, state, attempts):
        """Waits until the delivery has this state and number of attempts. Returns it and its attempts."""
        deadline = time.monotonic() + 60
        while True:
            found, made = await self.read(delivery_id)
            if (found.state, found.attempts) == (state, attempts):
                return found, made
            assert time.monotonic() < deadline, (found.state, found.attempts, made)
            await asyncio.sleep(0.01)

    def later(self, endpoint, seconds):
        self.clock.advance(seconds)
        self.schedule.endpoint_changed(endpoint.id)
