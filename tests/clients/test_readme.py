"""The README's first event, as printed: the page's script and the back end, each in a process of its own."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from helpers.server import Server
from helpers.wire import Api, eventually

HERE = Path(__file__).parent
README = HERE.parents[1] / "README.md"
TEXT = "Hello from redpoll"

# What a browser has and Node doesn't: a document, and what the script tag loaded.
BROWSER = """
import Pusher from "pusher-js";
globalThis.Pusher = Pusher;
globalThis.document = { body: { append: (text) => console.log(text) } };
"""


def snippet(server: Server, language: str) -> str:
    """The README's one block in this language, with id, key, secret and port filled in."""
    (block,) = re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    values = {
        "ID": server.app_id,
        "KEY": server.app_key,
        "SECRET": server.app_secret,
        "6001": str(server.port),
    }
    return re.sub(r'(?<=")(ID|KEY|SECRET)(?=")|\b6001\b', lambda found: values[found[0]], block)


@asynccontextmanager
async def running(*command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_readmes_snippets_deliver_an_event(server: Server, tmp_path: Path) -> None:
    (text,) = re.findall(r"<script>\n(.*?)</script>", snippet(server, "html"), re.DOTALL)
    # Beside node_modules, where an `import` finds it.
    page = HERE / "node_modules" / f".readme-{tmp_path.name}.mjs"
    page.write_text(BROWSER + text)
    (tmp_path / "backend.py").write_text(snippet(server, "python"))
    try:
        async with Api(server) as api, running("node", str(page)) as reader:
            await eventually(lambda: api.subscription_count("news"), 1)
            async with running(sys.executable, str(tmp_path / "backend.py")) as backend:
                assert await backend.wait() == 0
            assert reader.stdout is not None
            async with asyncio.timeout(60):
                assert (await reader.stdout.readline()).decode().strip() == TEXT
            reader.kill()
            await reader.wait()
            await eventually(lambda: api.subscription_count("news"), 0)
    finally:
        page.unlink()
