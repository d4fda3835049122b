"""Clients of the Durable Streams protocol, unmodified, as their users call them: `@durable-streams/client` in Node."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

CLIENTS = Path(__file__).parent
NODE = shutil.which("node") or "node"

_READER = """
import { stream } from "@durable-streams/client";
const [url, token, offset, live] = process.argv.slice(1);
const headers = { Authorization: `Bearer ${token}` };
const found = await stream({ url, headers, offset, live: live === "false" ? false : live });
// Not `closed`, which may come before the last items.
for await (const item of found.jsonStream()) console.log(JSON.stringify({ item, offset: found.offset }));
console.log(JSON.stringify({ closed: found.streamClosed }));
process.stdout.write("", () => process.exit(0));
"""


async def javascript(url: str, token: str, offset: str, live: str) -> AsyncIterator[dict[str, Any]]:
    """What it reads: `item` and `offset` of each message; `closed` at the end."""
    process = await asyncio.create_subprocess_exec(
        NODE,
        "--input-type=module",
        "-e",
        _READER,
        "--",
        url,
        token,
        offset,
        live,
        stdout=asyncio.subprocess.PIPE,
        cwd=CLIENTS,
    )
    try:
        assert process.stdout is not None
        while line := await asyncio.wait_for(process.stdout.readline(), 60):
            yield json.loads(line)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
