"""The HTTP client of deliveries: made with the first attempt. test_sender.py and test_guard.py have what it does."""

import asyncio
import subprocess
import sys
import textwrap

from helpers.receiver import Receiver
from redpoll.control.webhooks.client import Client
from redpoll.control.webhooks.sender import Sender, Target


async def test_attempts_that_begin_together_share_one_client_and_a_cancelled_one_does_not_stop_the_others(monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", "/dev/null")
    made, init = [], Client.__init__

    def counted(client, *arguments):
        made.append(client)
        init(client, *arguments)

    monkeypatch.setattr(Client, "__init__", counted)
    sender = Sender(allow_http=True, allow_addresses=("127.0.0.0/8",))
    async with Receiver() as receiver:
        attempts = [asyncio.create_task(sender.attempt(Target(receiver.url), b"{}", {})) for _ in range(4)]
        await asyncio.sleep(0)
        attempts[0].cancel()
        first, *others = await asyncio.gather(*attempts, return_exceptions=True)
    await sender.close()
    assert isinstance(first, asyncio.CancelledError)
    assert [attempt.ok for attempt in others] == [True] * 3
    assert len(made) == 1


FIRST_ATTEMPT = """
    import asyncio, sys, threading
    from redpoll.control.webhooks.sender import Sender, Target

    class Watch:
        def find_spec(self, name, *_more):
            if name == "aiohttp":
                print("imported in the loop's thread:", threading.current_thread() is threading.main_thread())

    async def main():
        sender = Sender(allow_http=True, allow_addresses=["127.0.0.0/8"])
        print(sender.check_url("http://example.com/"), "aiohttp" in sys.modules)
        sys.meta_path.insert(0, Watch())
        attempt = await sender.attempt(Target("http://127.0.0.1:1/"), b"{}", {})
        print(attempt.outcome, "aiohttp" in sys.modules)
        await sender.close()

    asyncio.run(main())
"""


def test_first_attempt_imports_the_client_in_a_thread_while_the_loop_runs():
    program = [sys.executable, "-c", textwrap.dedent(FIRST_ATTEMPT)]
    printed = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == ["None False", "imported in the loop's thread: False", "connect True"]
