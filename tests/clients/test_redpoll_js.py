"""The package redpoll-js: packed as for npm, type-checked, and its hooks and its transport for the AI SDK in Chromium.

The conversation is the example's, deploy/examples/answers, with its back end as a process. Here its components are in
a small bundle. In Next.js, which is 380 MB:

    (cd deploy/examples/answers && npm install)
    NEXT=deploy/examples/answers pytest tests/clients/test_redpoll_js.py -k next
"""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from playwright.async_api import Browser, Locator, Page, expect

from helpers.browser import chromium, new_page
from helpers.lengths import amount
from helpers.ports import reserved_ports
from helpers.reading import read_token
from helpers.server import Server
from helpers.walk import command
from helpers.wire import Api, eventually
from redpoll import __version__
from redpoll_client import AsyncPublisher

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGE = ROOT / "src" / "redpoll_js"
EXAMPLE = ROOT / "deploy" / "examples" / "answers"
PAGES = HERE / "redpoll_js"
SERVED = ROOT / "src" / "redpoll" / "control" / "static" / "redpoll.js"
NODE_MODULES = HERE / "node_modules"
MAX_PACKED_BYTES = 40_000
ESBUILD = ["--bundle", "--format=esm", "--jsx=automatic", '--define:process.env.NODE_ENV="development"']
# The example with its node_modules.
NEXT = os.environ.get("NEXT")
PAGE = '<!doctype html><meta charset="utf-8"><div id="root"></div><script type="module" src="/main.js"></script>'

# Tests with pages share a browser, and its event loop.
in_browser = pytest.mark.asyncio(loop_scope="module")
pytestmark = pytest.mark.skipif(not NODE_MODULES.is_dir(), reason="run `npm ci` in tests/clients first")
expect.set_options(timeout=60_000)


def run(*words: object, cwd: Path = HERE) -> str:
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packed package installed, the libraries of node_modules, and the example's and test's pages."""
    folder = tmp_path_factory.mktemp("project")
    source = folder / "source"
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("node_modules", "*.tgz", "redpoll.js"))
    packed = json.loads(run("npm", "pack", "--json", "--pack-destination", folder, cwd=source))
    [(entry)] = packed.values() if isinstance(packed, dict) else packed
    assert entry["size"] < MAX_PACKED_BYTES
    libraries = folder / "node_modules"
    libraries.mkdir()
    for library in NODE_MODULES.iterdir():
        if not library.name.startswith("."):
            (libraries / library.name).symlink_to(library)
    run("tar", "-xzf", entry["filename"], cwd=folder)
    (folder / "package").rename(libraries / "redpoll-js")
    shutil.copytree(EXAMPLE / "app", folder / "app")
    for path in PAGES.iterdir():
        if path.suffix in (".jsx", ".mjs", ".mts", ".cts"):
            shutil.copy(path, folder)
    return folder


# -- the package


def test_the_script_that_the_server_offers_is_made_of_the_modules(tmp_path: Path) -> None:
    """After a change in src/redpoll_js: node src/redpoll_js/build.mjs src/redpoll/control/static/redpoll.js"""
    run("node", PACKAGE / "build.mjs", tmp_path / "redpoll.js")
    assert (tmp_path / "redpoll.js").read_bytes() == SERVED.read_bytes()


def test_the_package_has_no_dependencies_and_what_its_exports_name(project: Path) -> None:
    folder = project / "node_modules" / "redpoll-js"
    about = json.loads((folder / "package.json").read_text())
    assert "dependencies" not in about
    assert about["license"] == "MIT"
    assert about["version"] == __version__
    assert set(about["peerDependenciesMeta"]) == set(about["peerDependencies"])
    named = set()

    def collect(value: object) -> None:
        if isinstance(value, dict):
            for inner in value.values():
                collect(inner)
        else:
            named.add(str(value).removeprefix("./"))

    collect(about["exports"])
    files = {path.name for path in folder.iterdir()}
    assert named <= files
    assert {"LICENSE", "README.md"} <= files
    assert "build.mjs" not in files
    assert (folder / "redpoll.js").read_bytes() == SERVED.read_bytes()


def test_a_program_that_uses_everything_passes_the_strict_type_check(project: Path) -> None:
    words = ["--strict", "--noEmit", "--target", "es2022", "--module", "preserve", "--types", ""]
    command_line = ["node", NODE_MODULES / "typescript" / "bin" / "tsc", *words, "program.mts", "required.cts"]
    checked = subprocess.run(command_line, cwd=project, capture_output=True, text=True, timeout=240, check=False)
    # Declarations of other libraries are theirs; those of the package are checked, which skipLibCheck would prevent.
    ours = ("program.mts", "required.cts", "node_modules/redpoll-js/")
    assert not [line for line in checked.stdout.splitlines() if line.startswith(ours)], checked.stdout
    assert checked.stdout or checked.returncode == 0, checked.stderr


def test_the_blocks_of_the_page_are_made_into_pages(project: Path) -> None:
    page = (ROOT / "deploy" / "docs" / "answers.md").read_text()
    folder = project / "blocks"
    folder.mkdir()
    blocks = re.findall(r'^```jsx? title="([^"]+)"\n(.*?)^```$', page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    for title, text in blocks:
        (folder / title).write_text(text)
    run(NODE_MODULES / ".bin" / "esbuild", "chat.jsx", "answer.jsx", *ESBUILD, "--outdir=made", cwd=folder)


def test_random_parts_make_the_text_that_was_sent_or_are_marked() -> None:
    made = json.loads(run("node", PAGES / "random_texts.mjs", 0, 2000))
    assert made["whole"] > 1000
    assert made["cut"] > 200


def test_the_transport_makes_whole_messages_of_chunks_or_errors(project: Path) -> None:
    assert run("node", "transport.mjs", cwd=project) == "ok\n"


def test_broken_streams_wrong_servers_and_handlers_that_throw_lose_and_double_nothing(project: Path) -> None:
    assert run("node", "asking.mjs", cwd=project) == "ok\n"


# -- pages


async def answers_at(url: str) -> bool:
    try:
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


class Site:
    """The example's back end, which can be killed, behind a web server with the pages."""

    def __init__(self, server: Server, bundle: bytes, folder: Path, port: int) -> None:
        self.server = server
        self.spoken = folder / "spoken"
        self.spoken.mkdir()
        self.settings = {"server": server.public_url, "app": server.app_id, "token": read_token(server)}
        self._bundle = bundle
        self._port = port
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None
        self._http = aiohttp.ClientSession()
        self.url = ""

    @property
    def backend_url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def publisher_url(self) -> str:
        server = self.server
        return f"http://{server.app_key}:{server.app_secret}@127.0.0.1:{server.port}/apps/{server.app_id}"

    async def start_backend(self) -> None:
        environment = {
            **os.environ,
            "REDPOLL_URL": self.publisher_url,
            "SPOKEN": str(self.spoken),
            "ANSWERS": str(self._folder / "answers.db"),
            "PYTHONPATH": os.pathsep.join([str(EXAMPLE), str(PAGES), *filter(None, sys.path)]),
        }
        words = ["-m", "uvicorn", "controlled:app", "--host", "127.0.0.1", "--port", str(self._port)]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, *words, "--log-level", "warning", env=environment, cwd=self._folder
        )

        await eventually(lambda: answers_at(f"{self.backend_url}/api/settings"), True)

    async def kill_backend(self, with_signal: int = signal.SIGKILL) -> None:
        assert self._process is not None
        self._process.send_signal(with_signal)
        await self._process.wait()

    async def _forward(self, request: web.Request) -> web.Response:
        url = f"{self.backend_url}{request.path_qs}"
        headers = {name: request.headers[name] for name in ("Content-Type", "X-Page") if name in request.headers}
        try:
            async with self._http.request(request.method, url, headers=headers, data=await request.read()) as answer:
                return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)
        except aiohttp.ClientError:
            raise web.HTTPBadGateway(text="the back end is away") from None

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Site"]:
        application = web.Application()

        def content(body: bytes, kind: str) -> web.Response:
            return web.Response(body=body, content_type=kind, charset="utf-8")

        async def page(_request: web.Request) -> web.Response:
            return content(PAGE.encode(), "text/html")

        async def script(_request: web.Request) -> web.Response:
            return content(self._bundle, "text/javascript")

        async def settings(_request: web.Request) -> web.Response:
            return web.json_response(self.settings)

        application.router.add_get("/", page)
        application.router.add_get("/main.js", script)
        application.router.add_get("/settings.json", settings)
        application.router.add_route("*", "/api/{rest:.*}", self._forward)
        runner = web.AppRunner(application)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
            await self.start_backend()
            yield self
        finally:
            if self._process is not None and self._process.returncode is None:
                await self.kill_backend(signal.SIGTERM)
            await runner.cleanup()
            await self._http.close()

    # -- the model

    def said(self, number: str) -> str:
        return (self.spoken / number).read_text()

    def enough(self, number: str) -> None:
        (self.spoken / f"enough-{number}").touch()


@pytest.fixture(scope="module")
def bundle(project: Path) -> bytes:
    run(NODE_MODULES / ".bin" / "esbuild", "main.jsx", "--outfile=main.js", *ESBUILD, cwd=project)
    return (project / "main.js").read_bytes()


@pytest.fixture(scope="module")
def answering() -> Iterator[Server]:
    """Two workers; channels `private-chat-…` store texts and join them."""
    with Server(workers=2) as running:
        words = ["--prefix", "private-chat-", "--keep", "10000", "--seconds", "600"]
        rate = ["--max-rate", "20", "--join", "delta", "--by", "stream"]
        command(running, "history", "rule", "add", running.app_id, *words, *rate)
        # Parts that have neither a number nor a length, and wait long for each other.
        for prefix in ("raw-", "private-raw-", "private-encrypted-raw"):
            words = ["--prefix", prefix, "--keep", "1000", "--seconds", "600", "--max-rate", "4"]
            command(running, "history", "rule", "add", running.app_id, *words, "--join", "delta", "--by", "message_id")
        yield running


@pytest.mark.parametrize(
    "case",
    [
        "leftBeforeSigned",
        "textLeftBeforeSigned",
        "askedAgain",
        "askedAgainOfTheServer",
        "removed",
        "signedTooLate",
        "signedTooLateElsewhere",
        "refusedAtOnce",
        "besideThePage",
        "otherName",
        "inTheMiddle",
        "encrypted",
        "brokenTwice",
        "backAtOnce",
    ],
)
def test_components_and_pages_share_channels(case: str, answering: Server, project: Path) -> None:
    """redpoll_js/holding.mjs says what each case is."""
    app = {"key": answering.app_key, "secret": answering.app_secret, "appId": answering.app_id, "port": answering.port}
    assert run("node", "holding.mjs", json.dumps(app), case, cwd=project) == "ok\n"


@pytest_asyncio.fixture(loop_scope="module")
async def site(answering: Server, bundle: bytes, tmp_path: Path) -> AsyncIterator[Site]:
    with reserved_ports(1) as [port]:
        made = Site(answering, bundle, tmp_path, port)
        async with made.running():
            yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as launched:
        yield launched


@asynccontextmanager
async def opened(browser: Browser, url: str) -> AsyncIterator[Page]:
    """A page of a device of its own. It must report no error."""
    page = await new_page(browser)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    await page.goto(url)
    yield page
    await page.context.close()
    assert not errors


def answers(page: Page, state: str) -> Locator:
    return page.locator(f'article[data-role="assistant"][data-state="{state}"]')


async def text_of(article: Locator) -> str:
    return await article.locator("p").first.text_content() or ""


async def ask(page: Page, text: str) -> None:
    await page.get_by_label("Message").fill(text)
    await page.get_by_role("button", name="Send").click()


async def whole_or_marked(browser: Browser, site: Site, url: str, url_with_silence: str) -> None:
    """Two pages show an answer, the first is reloaded several times; then a second answer, whose back end is killed."""
    async with AsyncExitStack() as pages:
        first = await pages.enter_async_context(opened(browser, url))
        await ask(first, "one")
        await expect(answers(first, "streaming")).to_contain_text("3 ")
        second = await pages.enter_async_context(opened(browser, url))
        for _ in range(amount(3, 10)):
            await first.reload()
            await expect(answers(first, "streaming")).to_contain_text("3 ")
            for page in (first, second):
                await expect(answers(page, "streaming")).to_contain_text("3 ")
                shown = await text_of(answers(page, "streaming"))
                assert site.said("one").startswith(shown)
        site.enough("one")
        for page in (first, second):
            await expect(answers(page, "done")).to_have_count(1)
            assert await text_of(answers(page, "done")) == site.said("one")

    async with AsyncExitStack() as pages:
        first, second = [await pages.enter_async_context(opened(browser, url_with_silence)) for _ in range(2)]
        for page in (first, second):
            await expect(answers(page, "done")).to_have_count(1)
        await ask(first, "two")
        latest = [page.locator("article").nth(3) for page in (first, second)]
        for article in latest:
            await expect(article).to_contain_text("3 ")
        await site.kill_backend()
        for article in latest:
            await expect(article).to_have_attribute("data-state", "failed")
            shown = await text_of(article)
            assert shown
            assert site.said("two").startswith(shown)
        await site.start_backend()
        await first.reload()
        await expect(latest[0]).to_have_attribute("data-state", "failed")
        assert await text_of(latest[0]) == await text_of(latest[1])
        assert await text_of(answers(first, "done")) == site.said("one")


@in_browser
@pytest.mark.parametrize("over", ["pusher", "http"])
async def test_an_answer_is_whole_or_marked_after_reloads_on_a_second_page_and_after_a_kill(
    over: str, site: Site, browser: Browser
) -> None:
    url = f"{site.url}?chat={over}&over={over}"
    await whole_or_marked(browser, site, url, f"{url}&silence=3000")


@in_browser
@pytest.mark.skipif(not NEXT, reason="NEXT=FOLDER names a copy of the example with its node_modules")
async def test_the_same_in_next_js(site: Site, browser: Browser) -> None:
    environment = {**os.environ, "BACKEND": site.backend_url, "NEXT_TELEMETRY_DISABLED": "1"}
    build = await asyncio.create_subprocess_exec("npx", "next", "build", cwd=NEXT, env=environment)
    assert await build.wait() == 0
    with reserved_ports(1) as [port]:
        words = ["node_modules/next/dist/bin/next", "start", "--hostname", "127.0.0.1", "--port", str(port)]
        pages = await asyncio.create_subprocess_exec("node", *words, cwd=NEXT, env=environment)
        try:
            await eventually(lambda: answers_at(f"http://127.0.0.1:{port}/"), True)
            # The example's page waits 30 s for the back end that was killed.
            await whole_or_marked(browser, site, f"http://127.0.0.1:{port}/", f"http://127.0.0.1:{port}/")
        finally:
            pages.terminate()
            await pages.wait()


@in_browser
async def test_a_stopped_answer_is_marked_on_each_page(site: Site, browser: Browser) -> None:
    url = f"{site.url}?chat=stopped&strict"
    async with opened(browser, url) as first, opened(browser, url) as second:
        await expect(second.get_by_text("2 open")).to_be_visible()
        await ask(first, "stop")
        for page in (first, second):
            await expect(answers(page, "streaming")).to_contain_text("3 ")
        # The text grows while the button is held.
        await second.get_by_role("button", name="Stop").click(delay=300)
        for page in (first, second):
            await expect(answers(page, "cancelled")).to_contain_text("Stopped.")
            assert site.said("stop").startswith(await text_of(answers(page, "cancelled")))
        await first.reload()
        await expect(answers(first, "cancelled")).to_contain_text("Stopped.")


@in_browser
async def test_hooks_show_channels_members_and_texts(site: Site, browser: Browser) -> None:
    async with (
        opened(browser, f"{site.url}?strict") as page,
        AsyncPublisher(url=site.publisher_url) as publisher,
        Api(site.server) as api,
    ):
        news, members = page.locator("#news"), page.locator("#members")
        await expect(news).to_have_attribute("data-state", "subscribed")
        await expect(members).to_have_text("1 a device")
        await expect(page.locator("#refused")).to_have_attribute("data-state", "failed")
        await expect(page.locator("#refused")).to_contain_text("didn't sign")
        await publisher.trigger("news", "goal", {"text": "one"})
        await publisher.trigger("news", "goal", {"text": "two"})
        await expect(news).to_have_text("one two")
        async with opened(browser, f"{site.url}"):
            await expect(members).to_have_text("2 a device")
        await expect(members).to_have_text("1 a device")

        # A component that goes ends the subscription; it is there again with the component.
        await page.click("#toggle")
        await eventually(lambda: api.subscription_count("news"), 0)
        await page.click("#toggle")
        await expect(news).to_have_attribute("data-state", "subscribed")

        texts = [page.locator(f"#{name}") for name in ("text", "again", "http")]
        for text in texts:
            await expect(text).to_have_attribute("data-state", "none")
        going, sent = asyncio.Event(), ["one 🐦 ", 'two "\\ ', "ü\n"] * 50

        async def parts(fails: bool) -> AsyncIterator[str]:
            for part in sent:
                yield part
            await going.wait()
            if fails:
                raise RuntimeError("the model failed")
            yield "the end"

        for fails, state, end in ((False, "done", "the end"), (True, "failed", "")):
            going.clear()
            streaming = asyncio.create_task(publisher.publish_stream("private-chat-text", "answer", parts(fails)))
            for text in texts:
                await expect(text).to_have_attribute("data-state", "streaming")
                await expect(text).to_have_text("".join(sent), use_inner_text=False)
            await page.reload()
            for text in texts:
                await expect(text).to_have_attribute("data-state", "streaming")
            going.set()
            assert (await asyncio.gather(streaming, return_exceptions=True))[0] is not None
            for text in texts:
                await expect(text).to_have_attribute("data-state", state)
                assert await text.text_content() == "".join(sent) + end
