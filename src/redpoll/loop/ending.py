"""Ends tasks before what they use is closed."""

import asyncio
from collections.abc import Collection
from typing import Any

__all__ = ["finish_tasks"]


async def finish_tasks(tasks: Collection[asyncio.Task[Any]], within_s: float) -> None:
    """Gives the tasks `within_s` seconds, cancels the rest, and returns when all have ended. `tasks` is what its owner
    keeps up to date: those that begin meanwhile count too."""
    try:
        async with asyncio.timeout(within_s):
            while tasks:
                await asyncio.wait(tasks)
    except TimeoutError:
        late = list(tasks)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
