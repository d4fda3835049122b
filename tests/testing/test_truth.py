"""The fake tells the truth: a random history of messages gives each client the same frames from both servers.

The long form: `HISTORY=1000 pytest tests/testing/test_truth.py`; `SEED=7` is another history.
"""

from __future__ import annotations

import json
import os

from click.testing import CliRunner

from redpoll.cli import main as command
from redpoll.protocol.limits import Limits
from redpoll.testing import FakeServer
from server import Server
from testing.twins import Side, Twins
from wire import Api

LENGTH = int(os.environ.get("HISTORY", "150"))
SEED = int(os.environ.get("SEED", "1"))
RULE = {"keep": 5, "seconds": 3600, "replay": 2, "client_events": False}


def run(server: Server, *words: str) -> None:
    result = CliRunner().invoke(command, [*words, "--json", "--data-dir", str(server.folder / "data")])
    assert result.exit_code == 0, result.output
    json.loads(result.stdout)


async def test_a_random_history_gives_each_client_the_same_frames() -> None:
    with Server(workers=1, client_events_per_second=10_000) as real:
        rule = ("--keep", "5", "--seconds", "3600", "--replay", "2")
        run(real, "history", "rule", "add", real.app_id, "--prefix", "kept-", *rule)
        fake = FakeServer(
            app_id=real.app_id,
            app_key=real.app_key,
            app_secret=real.app_secret,
            limits=Limits(client_events_per_s=10_000),
        )
        fake.keep_history("kept-", keep=5, replay=2)
        with fake:
            async with Api(fake) as fake_api, Api(real) as real_api:
                twins = Twins(Side(fake, fake_api), fake, Side(real, real_api), SEED)
                await twins.run(LENGTH)
