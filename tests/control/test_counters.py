"""The control plane's own figures; which there are is in observe/test_metrics.py."""

import asyncio


async def test_an_exception_in_the_loop_is_counted(plane, wait_until):
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await wait_until(lambda: plane.plane.counters.read()["loop_exceptions_total"] == 1)
