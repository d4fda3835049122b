"""The example's back end with a model that speaks until a file exists, and writes down what it says.

The folder SPOKEN has the files: NUMBER is what the model said, `enough-NUMBER` ends it.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import backend

FOLDER = Path(os.environ["SPOKEN"])
app = backend.app


async def model(messages: list[dict[str, Any]]) -> AsyncIterator[str]:
    number = messages[-1]["parts"][0]["text"]
    word = 0
    with (FOLDER / number).open("a", encoding="utf-8") as spoken:
        while not (FOLDER / f"enough-{number}").exists():
            word += 1
            part = f"{word}-Wört 🐦\n" if word % 7 == 0 else f'{word} "\\ '
            # First written down, so what a page shows is always in the file.
            spoken.write(part)
            spoken.flush()
            yield part
            await asyncio.sleep(0.01)


backend.model = model
