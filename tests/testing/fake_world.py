"""The matrix's world with a fake server for each app: no TLS, and no Chromium."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec

from clients.node import Node
from matrix.world import APPS, KEEPS, MASTER_KEY, App, World, website
from redpoll.protocol.apps import Key, parse_setting
from redpoll.testing import FakeServer

# Settings of the matrix's apps that the fake doesn't have.
_WITHOUT = ("user_resume_s",)


class FakeWorld(World):
    """As World. `fakes` are the servers by app id."""

    fakes: dict[str, FakeServer]

    async def command(self, *words: str) -> Any:
        """What the cells ask an operator for."""
        noun, verb, app_id, *more = words
        fake = self.fakes[app_id]
        if (noun, verb) == ("app", "set"):
            pairs = (pair.split("=", 1) for pair in more)
            fake.set(**{name: parse_setting(name, text) for name, text in pairs})
        elif (noun, verb) == ("key", "add"):
            key = Key(key=secrets.token_hex(10), secret=secrets.token_hex(10))
            self._change_keys(fake, (*fake.app.keys, key))
            return {"key": key.key, "secret": key.secret}
        elif (noun, verb) == ("key", "disable"):
            (name,) = more
            keys = tuple(msgspec.structs.replace(key, enabled=key.enabled and key.key != name) for key in fake.app.keys)
            self._change_keys(fake, keys)
        else:
            raise AssertionError(f"the fake has no command {words}")
        return None

    @staticmethod
    def _change_keys(fake: FakeServer, keys: tuple[Key, ...]) -> None:
        fake.change(msgspec.structs.replace(fake.app, keys=keys))


@asynccontextmanager
async def running_fake_world() -> AsyncIterator[FakeWorld]:
    with ExitStack() as stack:
        plain: FakeServer | None = None
        apps: dict[str, App] = {}
        fakes: dict[str, FakeServer] = {}
        for number, (name, texts) in enumerate(APPS.items(), start=1):
            settings = {key: parse_setting(key, text) for key, text in texts.items() if key not in _WITHOUT}
            fake = stack.enter_context(
                FakeServer(
                    app_id=str(number),
                    app_key=secrets.token_hex(10),
                    app_secret=secrets.token_hex(10),
                    encryption_master_key=MASTER_KEY,
                    **settings,
                )
            )
            plain = plain or fake
            fakes[fake.app_id] = fake
            apps[name] = App(fake.port, 0, fake.app_id, fake.app_key, fake.app_secret)
        assert plain is not None
        keeps = fakes[apps["keeps"].app_id]
        for prefix, fields in KEEPS.items():
            keeps.keep_history(prefix, **cast(Any, {"keep": 100, "seconds": 3600, **fields}))
        plain.add_token("page-token", ["auth"])
        async with Node(cast(Any, plain)) as node:
            world = FakeWorld(cast(Any, plain), apps, node, "", Path("/nowhere"), page_token="page-token")
            world.fakes = fakes
            async with website(world):
                origin = world.site_url.partition("://")[2]
                ours = fakes[apps["our page only"].app_id]
                ours.set(allowed_origins=(origin, f"127.0.0.1:{ours.port}"))
                yield world
