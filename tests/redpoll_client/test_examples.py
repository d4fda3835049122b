"""The example of each framework, in a real browser with Pusher's library, at a real redpoll and at the fake.

The page joins the user's own order, is refused another one, sees itself in a presence channel, signs in, and hears what
the example publishes. `EXAMPLES=all` runs each at the fake; `EXAMPLES=http://KEY:SECRET@HOST:PORT/apps/ID` runs each at
another server, such as soketi. `EXAMPLES_PYTHON` is another Python that runs them, with the packages that
redpoll-client and the frameworks need.
"""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from playwright.async_api import expect

from helpers.browser import chromium, new_page
from redpoll.testing import FakeServer

from .conftest import url_of

PUSHER_JS = Path(__file__).parents[1] / "clients" / "node_modules" / "pusher-js" / "dist" / "web" / "pusher.min.js"
SOURCES = Path(__file__).parents[2] / "src"
# What serves an example, and says where.
PYTHON = os.environ.get("EXAMPLES_PYTHON", sys.executable)
UVICORN = [PYTHON, "-m", "uvicorn", "--host", "127.0.0.1", "--port", "0"]
FLASK = [PYTHON, "-m", "flask", "--app", "redpoll_client.examples.flask_app", "run", "--port", "0"]
# Django's runserver doesn't say which free port it took.
DJANGO = """
import sys
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIServer, make_server
from redpoll_client.examples.django_app import application, call_command
call_command("migrate", verbosity=0)
class Threading(ThreadingMixIn, WSGIServer):
    daemon_threads = True
server = make_server("127.0.0.1", 0, application, Threading)
print(f"http://127.0.0.1:{server.server_port}", file=sys.stderr, flush=True)
server.serve_forever()
"""
EXAMPLES = {
    "django": [PYTHON, "-c", DJANGO],
    "fastapi": [*UVICORN, "redpoll_client.examples.fastapi_app:app"],
    "flask": FLASK,
}


WANTED = os.environ.get("EXAMPLES", "")
PLACES = {
    "": [("django", "redpoll"), ("fastapi", "redpoll"), ("flask", "redpoll"), ("fastapi", "fake")],
    "all": [(name, "fake") for name in EXAMPLES],
}.get(WANTED, [(name, "another") for name in EXAMPLES])


@pytest.fixture
def pusher_url(request, place):
    if place == "redpoll":
        yield url_of(request.getfixturevalue("server"))
    elif place == "fake":
        with FakeServer() as fake:
            yield fake.pusher_url
    else:
        yield WANTED


@pytest.fixture
def site(name, pusher_url, tmp_path):
    """The URL of a running example."""
    environment = {**os.environ, "REDPOLL_URL": pusher_url}
    # The examples are in no wheel. Another Python has the rest of its own.
    paths = [path for path in sys.path if path] if sys.executable == PYTHON else [str(SOURCES)]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    process = subprocess.Popen(
        EXAMPLES[name],
        env=environment,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    lines = []
    # Reads on, so that the example never waits for room in the pipe.
    reader = threading.Thread(target=lambda: lines.extend(process.stderr))
    try:
        for line in process.stderr:
            lines.append(line)
            if match := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            pytest.fail("the example ended: " + "".join(lines))
        reader.start()
        yield match[0]
    finally:
        process.terminate()
        process.wait(60)
        if reader.is_alive():
            reader.join()
        process.stderr.close()
        print("".join(lines))


@pytest.mark.parametrize(("name", "place"), PLACES)
async def test_a_page_joins_what_the_rules_allow(site):
    async with chromium() as browser:
        page = await new_page(browser)
        await page.route("https://js.pusher.com/**", lambda route: route.fulfill(path=PUSHER_JS))
        await page.goto(site)
        events = page.locator("#events")
        await expect(events).to_contain_text("subscribed")
        await expect(events).to_contain_text("refused: 403")
        await expect(events).to_contain_text("Welcome, anna")
        await expect(page.locator("#members")).to_have_text("Anna")
        await page.click("#pay")
        await expect(events).to_contain_text("paid by anna")
