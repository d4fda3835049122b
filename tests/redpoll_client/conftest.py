"""One running redpoll for the tests of the client library; both publishers behind one face."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from helpers import outbox_site
from helpers.server import Server
from helpers.walk import WEBHOOKS, command
from redpoll_client import AsyncPublisher, Publisher


@pytest.fixture(scope="package")
def server() -> Iterator[Server]:
    """Two workers, with the features that only redpoll has. Tests use channels of their own."""
    with Server(workers=2, **WEBHOOKS) as running:
        command(
            running,
            "app",
            "set",
            running.app_id,
            "idempotency=true",
            "watchlist=true",
            "subscription_count=true",
            "grants=true",
        )
        command(
            running, "history", "rule", "add", running.app_id, "--prefix", "kept-", "--keep", "1000", "--seconds", "600"
        )
        yield running


def url_of(server: Server) -> str:
    return f"http://{server.app_key}:{server.app_secret}@127.0.0.1:{server.port}/apps/{server.app_id}"


@pytest.fixture(scope="session")
def django_tables(tmp_path_factory) -> Iterator[None]:
    """Django in this process, with the settings of `outbox_site` and the tables on SQLite."""
    outbox_site.DATABASES["default"]["NAME"] = str(tmp_path_factory.mktemp("django") / "site.sqlite3")
    os.environ["DJANGO_SETTINGS_MODULE"] = "helpers.outbox_site"
    import django
    from django.core.management import call_command
    from django.db import connections

    zone = os.environ.get("TZ")
    django.setup()
    # Django sets the time zone of the process, in which other tests and their servers run.
    if zone is None:
        os.environ.pop("TZ", None)
    else:
        os.environ["TZ"] = zone
    time.tzset()
    call_command("migrate", verbosity=0)
    yield
    connections.close_all()


@pytest.fixture
def django_site(django_tables: None) -> None:
    """Django with empty tables."""
    from django.core.management import call_command

    call_command("flush", verbosity=0, interactive=False)


Call = Callable[..., Awaitable[Any]]


@pytest.fixture(params=["Publisher", "AsyncPublisher"])
def opened(request):
    """`async with opened(url=…) as call: await call("trigger", …)`, for each of the publishers. Without a `timeout`,
    they wait as long as a busy machine needs."""

    @asynccontextmanager
    async def opened(**options: Any) -> AsyncIterator[Call]:
        options.setdefault("timeout", 60)
        if request.param == "Publisher":
            with Publisher(**options) as publisher:
                yield lambda method, *args, **more: asyncio.to_thread(getattr(publisher, method), *args, **more)
        else:
            async with AsyncPublisher(**options) as publisher:
                yield lambda method, *args, **more: getattr(publisher, method)(*args, **more)

    return opened
