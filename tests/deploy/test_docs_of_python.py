"""The blocks of the Python pages, run as the pages say, against one server or the fake."""

import asyncio
import json
import re
import runpy
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.docs_blocks import blocks_of, folder_with_libraries, needs_node, operate, run, running, subscriber, written
from helpers.server import Server
from helpers.wire import Socket
from redpoll.testing import FakeServer
from redpoll_client import AsyncPublisher

EXAMPLE = Path(__file__).parents[2] / "deploy" / "examples" / "answers" / "backend.py"
PAGE = "quickstart/python.md"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(workers=2) as running:
        yield running


@pytest.mark.parametrize(
    ("page", "title", "text"),
    [
        (PAGE, "backend.py", "Hello from Python"),
        (PAGE, "backend_async.py", "Hello from asyncio"),
        ("python-coming-from.md", "changed_import.py", "Hello from a changed import"),
    ],
)
async def test_scripts(server, tmp_path, page, title, text):
    (client,) = written(tmp_path, server, PAGE, "client.py")
    (backend,) = written(tmp_path, server, page, title)
    async with subscriber(server, sys.executable, client) as reader:
        await run(sys.executable, backend)
        assert json.loads(await reader.line()) == {"text": text}


async def test_text_that_comes_bit_by_bit(server, tmp_path):
    client, stream = written(tmp_path, server, PAGE, "client.py", "stream.py")
    async with subscriber(server, sys.executable, client) as reader:
        await run(sys.executable, stream)
        deltas = ""
        while "state" not in (part := json.loads(await reader.line())):
            deltas += part["delta"]
        assert (deltas, part["state"]) == ("Hello from a model", "done")


async def test_between_processes(server, tmp_path):
    (script,) = written(tmp_path, server, "python-coming-from.md", "between_processes.py")
    assert await run(sys.executable, script) == "Hello from another process\n"


async def test_without_a_library(server, tmp_path):
    (script,) = written(tmp_path, server, PAGE, "with_token.py")
    made = operate(server, "token create", app=server.app_id, name="script", scopes=["publish"], lasts_s=None)
    client = await Socket.connect(server)
    await client.subscribe("news")
    assert (await run(sys.executable, script, TOKEN=made["token"])).strip() == "200"
    assert "Hello from a token" in str((await client.next("hello", "news"))["data"])
    await client.close()


# -- applications


async def test_a_killed_answer_is_stored_from_its_beginning(monkeypatch, tmp_path):
    """deploy/examples/answers. The answer has more parts than a page of a history."""
    monkeypatch.setenv("ANSWERS", str(tmp_path / "answers.db"))
    with FakeServer(max_batch=1000) as fake:
        fake.keep_history("private-chat-", keep=5000)
        monkeypatch.setenv("REDPOLL_URL", fake.pusher_url)
        example = runpy.run_path(str(EXAMPLE))
        example["store"]("7", "answer-1", "assistant", "", "streaming")
        words = [f"word {number} " for number in range(1200)]
        async with AsyncPublisher(url=fake.pusher_url) as publisher:
            parts = [{"stream": "answer-1", "n": number, "delta": word} for number, word in enumerate(words)]
            await publisher.trigger_batch({"channel": "private-chat-7", "name": "answer", "data": p} for p in parts)
            await example["mark_unfinished"](publisher)
    (answer,) = example["stored"]("7")
    assert (answer["parts"][0]["text"], answer["metadata"]["state"]) == ("".join(words), "failed")
    example["database"].close()


async def pytest_of(folder: Path, *files: str) -> str:
    """Runs tests of a page as its reader does, in a folder of their own."""
    more = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(folder)}
    plugin = ("-p", "redpoll.testing.plugin", "-p", "no:cacheprovider")
    return await run(sys.executable, "-m", "pytest", "-q", "--rootdir", folder, *plugin, *files, **more)


@pytest.mark.parametrize("framework", ["fastapi", "flask"])
async def test_an_app_and_its_tests(server, tmp_path, framework):
    written(tmp_path, server, f"quickstart/{framework}.md", "app.py", "test_app.py")
    assert "2 passed" in await pytest_of(tmp_path, tmp_path / "test_app.py")
    # As the page runs it.
    command = {
        "fastapi": ("uvicorn", "--app-dir", tmp_path, "--host", "127.0.0.1", "--port", "0", "app:app"),
        "flask": ("flask", "--app", tmp_path / "app.py", "run", "--port", "0"),
    }[framework]
    client = await Socket.connect(server)
    await client.subscribe("private-order-7")
    async with running(sys.executable, "-m", *command, REDPOLL_URL=server.pusher_url) as app:
        url = re.search(r"http://127\.0\.0\.1:\d+", await app.until("http://127.0.0.1:"))[0]
        cookie = "user=anna"
        if framework == "flask":
            cookie = await asyncio.to_thread(logged_in, url)
        await asyncio.to_thread(post, f"{url}/orders/7/pay", cookie)
        assert json.loads((await client.next("paid"))["data"]) == {"by": "anna"}
        form = urllib.parse.urlencode({"socket_id": client.socket_id, "channel_name": "presence-room-a"})
        answer = await asyncio.to_thread(post, f"{url}/realtime/auth", cookie, form.encode())
        assert json.loads(json.loads(answer)["channel_data"]) == {"user_id": "anna", "user_info": {"name": "anna"}}
    await client.close()


def logged_in(url: str) -> str:
    request = urllib.request.Request(f"{url}/login", b"")
    return str(urllib.request.urlopen(request, timeout=60).headers["Set-Cookie"])


def post(url: str, cookie: str, body: bytes = b"") -> bytes:
    request = urllib.request.Request(url, body, {"Cookie": cookie.partition(";")[0]})
    answer: bytes = urllib.request.urlopen(request, timeout=60).read()
    return answer


# What the page's reader does in the browser.
DJANGO = """
from django.contrib.auth import get_user_model
from django.test import Client

anna = get_user_model().objects.create_user("anna")
page = Client(headers={"host": "localhost"})
page.force_login(anna)
assert page.post("/orders/7/pay").status_code == 204
form = {"socket_id": "1.2", "channel_name": "private-order-7"}
assert page.post("/realtime/auth", form).status_code == 200
assert page.post("/realtime/auth", {**form, "channel_name": "private-order-8"}).status_code == 403
strict = Client(enforce_csrf_checks=True, headers={"host": "localhost"})
strict.force_login(anna)
assert strict.post("/realtime/auth", form).status_code == 403
"""


async def test_django(server, tmp_path):
    operate(server, "app set", id=server.app_id, settings={"idempotency": "true"})
    await run(sys.executable, "-m", "django", "startproject", "shop", tmp_path)
    titles = ("shop/realtime.py", "shop/urls.py", "shop/views.py", "shop/apps.py")
    *_, apps = written(tmp_path, server, "quickstart/django.md", *titles)
    (more,) = written(tmp_path, server, "quickstart/django.md", "settings_more.py")
    settings = tmp_path / "shop" / "settings.py"
    settings.write_text(settings.read_text() + more.read_text())
    assert "webhook_received" in apps.read_text()
    manage = (sys.executable, tmp_path / "manage.py")
    await run(*manage, "migrate")
    client = await Socket.connect(server)
    await client.subscribe("private-order-7")
    await run(*manage, "shell", "-c", DJANGO)
    await run(*manage, "redpoll_outbox", "--once")
    assert json.loads((await client.next("paid"))["data"]) == {"by": "anna"}
    await client.close()


@pytest.mark.parametrize("page", ["django", "fastapi", "flask"])
@needs_node
async def test_the_pages_code(server, tmp_path, page):
    """The options that pages give to pusher-js: they are one object, and it connects with them."""
    with folder_with_libraries(tmp_path) as folder:
        (script,) = written(folder, server, f"quickstart/{page}.md", "page.js")
        script.write_text(
            'const Pusher = require("pusher-js");\n'
            'globalThis.document = { querySelector: () => ({ value: "token" }) };\n'
            + script.read_text()
            + 'pusher.connection.bind("connected", () => { console.log(pusher.config.channelAuthorizer ? "yes" : "no");'
            + " process.exit(); });\n"
        )
        assert (await run("node", script)).endswith("yes\n")


# -- tests


async def test_tests_of_the_page_on_testing(server, tmp_path):
    orders, with_unittest = written(tmp_path, server, "python-testing.md", "test_orders.py", "with_unittest.py")
    assert "3 passed" in await pytest_of(tmp_path, orders)
    assert "OK" in await run(sys.executable, with_unittest)


@needs_node
async def test_a_suite_in_another_language(tmp_path):
    with folder_with_libraries(tmp_path) as folder, FakeServer(suite_routes=True) as fake:
        (suite,) = written(folder, fake, "python-testing.md", "orders.test.mjs")
        assert "pass 1" in await run("node", "--test", suite)


def test_every_block_of_these_pages_runs():
    pages = ("python", "django", "fastapi", "flask")
    known = Path(__file__).read_text() + (Path(__file__).parent / "test_docs.py").read_text()
    for page in (*(f"quickstart/{name}.md" for name in pages), "python-testing.md", "python-coming-from.md"):
        assert all(title in known for title in blocks_of(page)), page
