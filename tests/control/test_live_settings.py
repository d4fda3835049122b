"""What a reload changes in control."""

import asyncio

from redpoll.config.settings import Settings
from redpoll.control.live_settings import LiveSettings
from redpoll.ipc.messages import Reload


async def test_reload_asks_the_supervisor_and_every_caller_gets_its_answer():
    told = []
    live = LiveSettings(Settings(), told.append)
    callers = [asyncio.ensure_future(live.reload()) for _ in range(2)]
    given_up = asyncio.ensure_future(live.reload())
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.sleep(0)
    assert told == [Reload()] * 3
    live.reloaded({"faults": []})
    assert await asyncio.gather(*callers) == [{"faults": []}] * 2


def test_changed_settings_replace_the_old_ones():
    live = LiveSettings(Settings(), lambda message: None)
    before = live.now
    live.changed({"max_message_bytes": 5_000})
    assert live.now.max_message_bytes == 5_000
    assert live.now.changed_by({"max_message_bytes": before.max_message_bytes}) == before
