"""The documentation: the site builds, every command line is one that redpoll accepts, and every block of code that can
run here does what its page says, against one server.

The blocks of the Python pages: test_docs_of_python.py.
"""

import asyncio
import json
import re
import shlex
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import click
import docs_pages
import pytest
import yaml
from aiohttp import web

from deploy.docs_blocks import (
    BLOCK,
    DOCS,
    NODE_MODULES,
    blocks_of,
    folder_with_libraries,
    name_of,
    needs_node,
    operate,
    run,
    running,
    subscriber,
    written,
)
from helpers.browser import chromium, new_page
from helpers.ports import reserved_ports
from helpers.server import Server
from helpers.wire import Api, Socket, digest, eventually
from redpoll.cli import main

ROOT = Path(__file__).parents[2]
PAGES = sorted(DOCS.rglob("*.md"))
README = ROOT / "README.md"
# All Markdown that people read.
MARKDOWN = sorted(
    [
        *(page for place in (ROOT, ROOT / ".github", ROOT / "tests") for page in place.glob("*.md")),
        *(
            page
            for place in ("src", "ext", "bench", "deploy")
            for page in (ROOT / place).rglob("*.md")
            if "node_modules" not in page.parts
        ),
    ]
)
MAX_LINE = 120
# Commands of the pages begin a line of an indented block.
COMMAND = re.compile(r"^    (?:[A-Z_]+=\S+ )*(redpoll .*)$", re.MULTILINE)


# -- the site


def test_the_site_builds_without_a_warning_and_has_every_page(tmp_path):
    # Not --quiet: it hides warnings from --strict.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", ROOT / "deploy" / "mkdocs.yml"]
    built = subprocess.run([*command, "-d", tmp_path], capture_output=True, text=True, timeout=280, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {name_of(page).removesuffix(".md") for page in PAGES} | docs_pages.GENERATED.keys()
    pages |= set(docs_pages.INCLUDED.values())
    for page in pages - {"index"}:
        assert (tmp_path / page / "index.html").is_file()
    protocol = (tmp_path / "protocol" / "index.html").read_text()
    # A citation of a heading, and the anchor that it leads to.
    assert 'href="#close-codes"' in protocol or 'id="close-codes"' in protocol
    # Each page's Markdown is there too, and llms.txt lists them all.
    listed = re.findall(r"^- \[[^\]]+\]\(([\w/-]+\.md)\): \S", (tmp_path / "llms.txt").read_text(), re.MULTILINE)
    assert {path.removesuffix(".md") for path in listed} == pages
    assert all((tmp_path / path).read_text().startswith("# ") for path in listed)
    # Nothing is loaded from elsewhere.
    assert not re.findall(r'(?:src|href)="https?://[^"]*\.(?:js|css|woff2?)"', protocol)


def test_links_are_made_for_the_site():
    def site(text: str, source: str = "deploy/docs/quickstart/node.md") -> str:
        return docs_pages.rewritten(text, source).replace(".md#", "#")

    assert site("[a](../../README.md#tls)") == "[a](../operation#tls)"
    assert site("[a](#here) [b](https://example.com/x.md)") == "[a](#here) [b](https://example.com/x.md)"
    assert (
        site("[rules](../prometheus/alerts.yml)", "deploy/docs/monitoring.md")
        == "rules (`deploy/prometheus/alerts.yml`)"
    )
    assert site('see `protocol/README.md "Close codes"`') == "see [Close codes](../protocol#close-codes)"
    # The repository's README.md comes before that of the citing page's folder, and isn't on the site.
    assert site('`README.md "Figures"`', "deploy/failures.md") == '`README.md "Figures"`'
    assert site("```\n[a](../../README.md)\n```") == "```\n[a](../../README.md)\n```"
    assert site("![x](screenshots/trace.png)", "deploy/README.md") == "![x](screenshots/trace.png)"


def test_page_of_settings_has_every_setting_and_its_variables():
    page = docs_pages.settings_page()
    assert page.count("\n## ") == len(docs_pages.TABLE)
    assert "| `6001` | `--port` | `REDPOLL_PORT`, `SOKETI_PORT`" in page
    assert "| empty | none | `REDPOLL_APP_SECRET`" in page


def test_page_of_commands_has_examples_and_options():
    page = docs_pages.commands_page()
    assert "### redpoll publish" in page
    assert "    redpoll connections kick 1234567 123.456" in page
    assert "| `--socket-id " in page


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_line_is_one_that_redpoll_accepts(page):
    def parse(command: click.Command, arguments: list[str]) -> None:
        context = click.Context(command, info_name="redpoll")
        if isinstance(command, click.Group):
            _, child, rest = command.resolve_command(context, arguments)
            parse(child, rest)
        else:
            command.parse_args(context, arguments)

    for line in COMMAND.findall(page.read_text()):
        parse(main, shlex.split(line, comments=True)[1:])


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_lines_are_short(page):
    """What doesn't fit into a row of a table is a list, or text below the table."""
    found = [
        f"line {number}: {line}"
        for number, line in enumerate(page.read_text().split("\n"), 1)
        # README's second command is one line, to paste it.
        if len(line) > MAX_LINE and not (page == README and line.startswith("Test it: `"))
    ]
    assert not found, "\n".join(found)


def test_readme_is_short_and_opens_with_its_commands():
    lines = README.read_text().splitlines()
    assert len(lines) <= 170
    assert lines[2].startswith("Run it: `")
    assert lines[4].startswith("Test it: `")


def test_recipes_for_texts_name_the_limit_of_publishes():
    """A text in parts is more publishes than an address may send by default."""
    is_recipe = re.compile(r"--join [a-z]|^ +join: |\.publish_stream\(", re.MULTILINE)
    recipes = [page for page in MARKDOWN if is_recipe.search(page.read_text())]
    assert {"answers", "history", "laravel", "python"} <= {page.stem for page in recipes}
    assert not [page for page in recipes if not re.search("trigger[-_]rate[-_]per[-_]minute", page.read_text())]


# -- blocks of code


def test_pages_load_the_pusher_js_that_is_tested():
    tested = json.loads((ROOT / "tests" / "clients" / "package.json").read_text())["dependencies"]["pusher-js"]
    examples = [page for page in (ROOT / "src").rglob("*.html") if "node_modules" not in page.parts]
    scripts = [*(ROOT / "src" / "redpoll_js").glob("*.mjs")]
    loaded = {
        (page.relative_to(ROOT).as_posix(), version)
        for page in (*MARKDOWN, *examples, *scripts)
        for version in re.findall(r"js\.pusher\.com/([^/]+)/", page.read_text())
    }
    assert {"README.md", "src/redpoll_client/examples/page.html"} <= {page for page, _ in loaded}
    assert not [one for one in loaded if one[1] != tested]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_of_a_known_language_and_readable(page, tmp_path):
    for language, title, text in BLOCK.findall(page.read_text()):
        assert language in ("html", "ini", "js", "json", "jsx", "php", "python", "ruby", "yaml"), f"{title}: {language}"
        if language == "json":
            json.loads(text)
        elif language == "yaml":
            yaml.safe_load(text)
        elif language == "python":
            compile(text, title, "exec")
        elif language in ("php", "ruby") and shutil.which(language):
            (tmp_path / "block").write_text(text)
            option = {"php": "-l", "ruby": "-c"}[language]
            subprocess.run([language, option, tmp_path / "block"], check=True, capture_output=True)
        elif language == "ini":
            assert all(re.fullmatch(r"[A-Z_]+=\S+", line) for line in text.split("\n") if line)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    intranet = {"webhook_allow_http": 1, "webhook_allow_addresses": "127.0.0.0/8"}
    with Server(workers=2, **intranet) as running:
        yield running


@pytest.fixture(scope="module")
def kept_news(server) -> None:
    """A history of each channel that begins with `news-`."""
    operate(server, "history rule add", app=server.app_id, name="news-", prefix=True, keep=1000, seconds=3600)


@pytest.fixture
def folder(tmp_path) -> Iterator[Path]:
    with folder_with_libraries(tmp_path) as made:
        yield made


@needs_node
async def test_node(server, folder):
    backend, client = written(folder, server, "quickstart/node.md", "backend.mjs", "client.mjs")
    async with subscriber(server, "node", client) as reader:
        await run("node", backend)
        assert await reader.line() == "Hello from Node"


async def leave_in_the_middle(port: int) -> None:
    """Announces a body and leaves."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n")
    await writer.drain()
    writer.close()
    await writer.wait_closed()


async def answer_of(url: str, body: bytes | None = None, **headers: str) -> int:
    """The status of the answer, 0 without one."""
    asked = urllib.request.Request(url, body, {name.replace("_", "-"): value for name, value in headers.items()})
    try:
        with await asyncio.to_thread(urllib.request.urlopen, asked, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@needs_node
@pytest.mark.parametrize(
    ("page", "auth", "program"), [("node", "auth.mjs", "node"), ("python", "auth.py", sys.executable)]
)
async def test_private_channels(server, folder, page, auth, program):
    """Also after requests that pusher-js doesn't send."""
    (signer,) = written(folder, server, f"quickstart/{page}.md", auth)
    async with running(program, signer, 0) as signing:
        address = await signing.line()
        await leave_in_the_middle(int(address.rstrip("/").rpartition(":")[2]))
        assert await answer_of(f"{address.rstrip('/')}/favicon.ico") in (400, 500)
        assert await answer_of(address, b"socket_id=x&channel_name=private-a") in (400, 500)
        values = {"http://127.0.0.1:8000": address.rstrip("/")}
        (client,) = written(folder, server, "quickstart/node.md", "private.mjs", **values)
        async with running("node", client) as reader:
            assert await reader.until("here") == "1 here, I am Anna"


async def until_granted(server: Server, auth: str) -> None:
    """Waits until a worker knows that the app accepts grants."""
    async with asyncio.timeout(60):
        while True:
            client = await Socket.connect(server)
            client.send({"event": "pusher:subscribe", "data": {"channel": "private-org-3-x", "auth": auth}})
            answer = await client.next(None, "private-org-3-x")
            client.abort()
            if answer["event"] == "pusher_internal:subscription_succeeded":
                return
            assert "setting `grants`" in answer["data"]


@needs_node
@pytest.mark.parametrize(
    ("program", "block"), [(sys.executable, "grant.py"), ("node", "grant.mjs"), ("php", "grant.php")]
)
async def test_grants(server, folder, program, block):
    """A JWT of PyJWT, jose or PHP opens the channels of a stock pusher-js."""
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")
    operate(server, "app set", id=server.app_id, settings={"grants": "true"})
    minting, page = written(folder, server, "grants.md", block, "page.mjs")
    auth = (await run(program, minting)).strip()
    await until_granted(server, auth)
    asked = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.json_response({"auth": auth, "user_id": "7", "seconds": 3600})

    site = web.Application()
    site.router.add_get("/grant", answer)
    runner = web.AppRunner(site)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    page.write_text(page.read_text().replace("127.0.0.1:8000", f"127.0.0.1:{runner.addresses[0][1]}"))
    try:
        async with running("node", page) as reader, Api(server) as api:
            assert await reader.until("here") == "1 here, I am 7"
            await eventually(lambda: api.subscription_count("private-org-3-news"), 1)
            await api.publish("private-org-3-news", "hello", '{"text":"granted"}')
            await reader.until("granted")
            # pusher-js asks for both channels at once.
            assert asked == 1
            # Not by the user: the next grant may be issued within the same second.
            jti = operate(server, "grant check", app=server.app_id, auth=auth, channel=None)["jti"]
            status, revoked = await api.ask("POST", "/grants/revoke", {"jti": jti})
            # A worker that is late isn't counted, and ends them as well.
            assert (status, revoked["unsubscribed"] <= 2) == (200, True)
            await reader.until("access was revoked")
    finally:
        await runner.cleanup()


@needs_node
async def test_nextjs(server, folder):
    titles = ("lib/backend.js", "app/api/news/route.js", "app/api/auth/route.js")
    _, news, auth = written(folder, server, "quickstart/nextjs.md", *titles)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "call.js").write_text(
        f"""
        import {{ POST as news }} from "{news}";
        import {{ POST as auth }} from "{auth}";
        const answer = await news(new Request("http://x", {{ method: "POST", body: '{{"text":"Hello from Next"}}' }}));
        const form = "socket_id=1.2&channel_name=presence-a";
        const signed = await (await auth(new Request("http://x", {{ method: "POST", body: form }}))).json();
        console.log(answer.status, signed.auth.split(":")[0], signed.channel_data);
        """
    )
    client = await Socket.connect(server)
    await client.subscribe("news")
    said = await run("node", folder / "call.js", REDPOLL_URL=server.pusher_url)
    assert said.strip() == f'200 {server.app_key} {{"user_id":"42"}}'
    assert "Hello from Next" in str((await client.next("hello", "news"))["data"])
    await client.close()


@needs_node
async def test_laravel_echo(server, folder):
    variables = dict(line.split("=", 1) for line in blocks_of("quickstart/laravel.md")[".env"].split("\n") if line)
    filled = {"KEY": server.app_key, "6001": str(server.port)}
    # Vite replaces these in the build.
    values = {
        f"import.meta.env.{name}": json.dumps(filled.get(value := variables[name.removeprefix("VITE_")], value))
        for name in variables
        if name.startswith("VITE_")
    }
    (client,) = written(folder, server, "quickstart/laravel.md", "resources/js/echo.js", **values)
    client.write_text("globalThis.window = globalThis;\n" + client.read_text())
    (folder / "package.json").write_text('{"type": "module"}')
    async with subscriber(server, "node", client) as reader, Api(server) as api:
        await api.publish("news", "hello", '{"text":"Hello from Laravel"}')
        assert await reader.line() == "Hello from Laravel"


@needs_node
async def test_rails_page(server, folder):
    (client,) = written(folder, server, "quickstart/rails.md", "app/javascript/news.js")
    (folder / "package.json").write_text('{"type": "module"}')
    async with subscriber(server, "node", client) as reader, Api(server) as api:
        await api.publish("news", "hello", '{"text":"Hello from Rails"}')
        assert await reader.line() == "Hello from Rails"


# What Rails and the gem have, and a user.
RAILS = """
User = Struct.new(:id, :name)
module Pusher
  def self.authenticate(channel, socket_id, user = nil) = "signed #{channel} #{user && user[:user_id]}".strip
end
class ApplicationController
  attr_reader :current_user, :params

  def initialize(user, channel)
    @current_user = user
    @params = { channel_name: channel, socket_id: "1.2" }
  end

  def head(status) = puts(status)
  def render(json:) = puts(json)
end
require "./pusher_controller"
asked = [[7, "private-user-7"], [7, "presence-room"], [8, "private-user-7"], [7, nil], [nil, "presence-room"]]
asked.each { |id, channel| PusherController.new(id && User.new(id, "Anna"), channel).auth }
"""


@pytest.mark.skipif(shutil.which("ruby") is None, reason="needs ruby")
async def test_rails_signs_what_the_user_may_join(server, folder):
    (controller,) = written(folder, server, "quickstart/rails.md", "app/controllers/pusher_controller.rb")
    (controller.parent / "call.rb").write_text(RAILS)
    said = await run("ruby", "-C", controller.parent, "call.rb")
    signed = ["signed private-user-7", "signed presence-room 7"]
    assert said.splitlines() == [*signed, "forbidden", "forbidden", "forbidden"]


@needs_node
async def test_plain_html(server, folder):
    (page_file,) = written(folder, server, "quickstart/html.md", "page.html")
    library = NODE_MODULES / "pusher-js" / "dist" / "web" / "pusher.min.js"
    async with chromium() as browser, Api(server) as api:
        page = await new_page(browser)
        await page.route("https://js.pusher.com/**", lambda route: route.fulfill(path=library))
        await eventually(lambda: api.subscription_count("news"), 0)
        await page.goto(page_file.as_uri())
        await eventually(lambda: api.subscription_count("news"), 1)
        await api.publish("news", "hello", '{"text":"Hello, page"}')
        await page.get_by_text("Hello, page").wait_for()


@needs_node
async def test_history(server, kept_news, folder):
    made = operate(server, "token create", app=server.app_id, name="reader", scopes=["read"], lasts_s=None)
    client, script = written(folder, server, "history.md", "recovering.mjs", "history.py")
    shutil.copy(ROOT / "src" / "redpoll" / "control" / "static" / "redpoll.js", folder / "redpoll.cjs")
    client.write_text(client.read_text().replace("./redpoll.js", "./redpoll.cjs"))
    async with Api(server) as api:
        await api.publish("news-sport", "goal", '{"text":"1:0"}')
        async with running("node", client) as reader:
            assert {await reader.line(), await reader.line()} == {"1:0", "1 stored"}
        # More than two pages.
        for first in range(0, 210, 10):
            batch = [{"channel": "news-sport", "name": "n", "data": str(n)} for n in range(first, first + 10)]
            assert await api.ask("POST", "/batch_events", {"batch": batch}) == (200, {})
    lines = (await run(sys.executable, script, TOKEN=made["token"])).splitlines()
    assert [line.split(" ")[-1] for line in lines] == ['{"text":"1:0"}', *map(str, range(210))]


@needs_node
async def test_readme_of_redpoll_js(server, kept_news, folder):
    (folder / "node_modules").mkdir()
    (folder / "node_modules" / "redpoll-js").symlink_to(ROOT / "src" / "redpoll_js")
    channel = {'"news"': '"news-of-the-readme"'}
    (client,) = written(folder, server, "../../src/redpoll_js/README.md", "news.mjs", **channel)
    async with Api(server) as api:
        await api.publish("news-of-the-readme", "goal", '{"text":"1:0"}')
        async with running("node", client) as reader:
            assert {await reader.line(), await reader.line()} == {"1:0", "1"}


@needs_node
async def test_a_page_of_history_that_fails_ends_no_client(server, folder):
    """The server refuses it, as no rule stores this channel."""
    client, channel = folder / "recovering.mjs", {"news-sport": "unstored"}
    written(folder, server, "history.md", "recovering.mjs", **channel)
    shutil.copy(ROOT / "src" / "redpoll" / "control" / "static" / "redpoll.js", folder / "redpoll.cjs")
    client.write_text(client.read_text().replace("./redpoll.js", "./redpoll.cjs"))
    async with running("node", client) as reader, Api(server) as api:
        await reader.until("unstored")
        await api.publish("unstored", "goal", '{"text":"1:0"}')
        assert await reader.line() == "1:0"


CURL = re.compile(r"^    (curl .*)$", re.MULTILINE)


@needs_node
async def test_streams(server, kept_news, folder):
    tokens = {
        scope: operate(server, "token create", app=server.app_id, name=scope, scopes=[scope], lasts_s=None)["token"]
        for scope in ("read", "publish")
    }
    stored, live = CURL.findall((DOCS / "streams.md").read_text())
    curl = {"STREAM": f"{server.public_url}/apps/{server.app_id}/channels/news-sport/stream", "TOKEN": tokens["read"]}
    client, script, page_file = written(folder, server, "streams.md", "read.mjs", "answer.py", "source.html")
    (in_python,) = written(folder, server, "streams.md", "read.py")
    page_file.write_text(page_file.read_text().replace("=TOKEN", f"={tokens['read']}"))
    async with Api(server) as api, chromium() as browser:
        # Of other tests.
        await api.ask("DELETE", "/channels/news-sport/history")
        await api.publish("news-sport", "goal", '{"text":"1:0"}')
        answer = await run("sh", "-c", stored, **curl)
        assert "stream-next-offset: " in answer.lower()
        assert '"data":"{\\"text\\":\\"1:0\\"}"' in answer
        page = await new_page(browser)
        await page.goto(page_file.as_uri())
        await page.get_by_text("1:0").wait_for()
        async with (
            running("sh", "-c", live, **curl) as follower,
            running("node", client, TOKEN=tokens["read"]) as reader,
        ):
            await follower.until("streamNextOffset")
            assert await reader.line() == 'goal {"text":"1:0"}'
            await api.publish("news-sport", "goal", '{"text":"1:1"}')
            assert await reader.line() == 'goal {"text":"1:1"}'
            assert "1:1" in await follower.until("1:1")
        await page.get_by_text("1:1").wait_for()
        assert await run(sys.executable, script, TOKEN=tokens["publish"]) == ""
        refused = await api.ask("POST", "/events", {"name": "text", "channel": "news-answer-7", "data": "{}"})
        assert refused[1]["code"] == "channel_ended"
        assert (await run(sys.executable, in_python)).count("delta") == 4


async def test_app_is_made_over_http(server):
    made = operate(server, "token create", app=None, name="platform", scopes=["manage"], lasts_s=None)
    (command,) = re.findall(
        r"^```bash\n(curl .*?)\n```$", (ROOT / "deploy/README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    command = command.replace("http://127.0.0.1:9601", server.control_url)
    answer = json.loads(await run("sh", "-c", command.replace("curl ", "curl -s "), TOKEN=made["token"]))
    assert (answer["name"], answer["settings"]["max_connections"]) == ("Customer 7", 100)
    operate(server, "app delete", id=answer["id"])


async def test_repeated_publish_and_its_trace(server, folder):
    operate(server, "app set", id=server.app_id, settings={"idempotency": "true"})
    made = operate(server, "token create", app=server.app_id, name="repeating", scopes=["all"], lasts_s=None)
    repeat, became = written(folder, server, "beyond.md", "repeat.py", "what_became.py")
    client = await Socket.connect(server)
    await client.subscribe("orders")
    first, _ = (await run(sys.executable, repeat, TOKEN=made["token"])).split()
    async with Api(server) as api:
        await api.publish("orders", "last", "{}")
        await client.next("last", "orders")
        assert [frame["event"] for frame in client.frames].count("paid") == 1

        async def is_written() -> bool:
            status, trace = await api.ask("GET", f"/trace/{first}")
            return status == 200 and "written" in [span["stage"] for span in trace["spans"]]

        await eventually(is_written, True)
    assert "written" in await run(sys.executable, became, first, TOKEN=made["token"])
    operate(server, "app set", id=server.app_id, settings={"idempotency": "false"})
    await client.close()


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_ports(1) as (port,):
        yield port


RECEIVERS = {
    "receiver.py": lambda path, port: (sys.executable, path, port),
    "receiver.mjs": lambda path, port: ("node", path, port),
    # Without php.ini, as in PHP's image: there errors are displayed, and a script that fails has the status 200.
    "receiver.php": lambda path, port: ("php", "-n", "-S", f"127.0.0.1:{port}", path),
    "receiver.rb": lambda path, port: ("ruby", path, port),
}


@pytest.mark.parametrize("title", RECEIVERS)
async def test_webhook_receiver(server, folder, port, title):
    (path,) = written(folder, server, "webhooks.md", title)
    command = RECEIVERS[title](path, port)
    if shutil.which(str(command[0])) is None:
        pytest.skip(f"{command[0]} isn't installed")
    url = f"http://127.0.0.1:{port}/"
    hook = operate(
        server, "webhook create", app=server.app_id, url=url, events=["all"], format="service", channels=[], pin=False
    )
    async with running(*command, WEBHOOK_SECRET=hook["secret"], TMPDIR=str(folder)) as receiver:
        # Every receiver prints its address when it listens.
        await receiver.until(f"http://127.0.0.1:{port}")
        await leave_in_the_middle(port)
        assert await answer_of(url, b"{}", X_Service_Signature="00", X_Service_Delivery="1") == 401

        async def deliver(body: object, delivery: str) -> int:
            text = json.dumps(body)
            return await answer_of(
                url, text.encode(), X_Service_Signature=digest(hook["secret"], text), X_Service_Delivery=delivery
            )

        # What fails isn't noted as handled, so that the next attempt is.
        assert await deliver("no webhook", "a-1") in (0, 500)
        for event, delivery in (("first", "a-1"), ("repeat", "a-1"), ("second", "a-2")):
            assert await deliver({"event": event, "data": {"channel": "a"}}, delivery) == 204
        handled: list[str] = []
        while "second" not in handled:
            # A traceback in another thread may break its line.
            handled += re.findall("first|repeat|second", await receiver.line())
        assert handled == ["first", "second"]
        client = await Socket.connect(server)
        await client.subscribe(f"room-of-{title}")
        assert (await receiver.until("channel.occupied")).endswith(f"channel.occupied room-of-{title}")
        # For a day the receiver may have the secret before.
        operate(server, "webhook rotate", id=hook["id"])
        await client.close()
        assert (await receiver.until("channel.vacated")).endswith(f"channel.vacated room-of-{title}")
        operate(server, "webhook delete", id=hook["id"])


def test_navigation_has_every_page():
    text = (ROOT / "deploy" / "mkdocs.yml").read_text()
    # The tag names a Python object.
    nav = yaml.safe_load(re.sub(r"!!python\S+ ", "", text))["nav"]

    def pages(entries: list) -> Iterator[str]:
        for entry in entries:
            for value in entry.values():
                yield from pages(value) if isinstance(value, list) else [value]

    listed = [page.removesuffix(".md") for page in pages(nav)]
    files = {name_of(page).removesuffix(".md") for page in PAGES}
    assert sorted(listed) == sorted({*files, *docs_pages.INCLUDED.values(), *docs_pages.GENERATED})
