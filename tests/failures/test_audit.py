"""The control plane is killed at random moments while records change: each change has its row in the audit log, and
each row its change (deploy/failures.md "Control plane killed").

The long form makes 1,000 changes and kills it fifty times:

    python bench/failures.py audit
"""

import os
import random
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from helpers.server import Server
from redpoll.ipc.command_socket import CommandError, ask, socket_path

# A change takes 5 to 30 ms.
WITHIN_S = 0.04
SEED = 20_261_124


class Operator:
    """Makes changes through the command socket. A command without an answer may have been carried out or not."""

    def __init__(self, server: Server) -> None:
        self._path = socket_path(server.folder / "data")
        self.answered = 0
        self.unanswered = 0

    def __call__(self, verb: str, **args: Any) -> Any:
        """The result; None if the server was killed meanwhile, or refused because an earlier change wasn't made."""
        while True:
            try:
                result = ask(self._path, verb, args)
            except (FileNotFoundError, ConnectionRefusedError):
                time.sleep(0.05)
                continue
            except CommandError as error:
                if "still starting" in str(error):
                    time.sleep(0.05)
                    continue
                self.unanswered += "did not answer" in str(error)
                return None
            self.answered += 1
            return result


def changes(do: Operator, count: int) -> Iterator[None]:
    """Makes `count` changes of all kinds, one at each step."""
    app = hook = rule = token = None
    for number in range(count):
        match number % 12:
            case 0:
                app = (do("app create", name=f"app {number}") or {}).get("id") or app
            case 1:
                do("app set", id=app, settings={"max_batch": str(number + 1)})
            case 2:
                do("key add", app=app, key=None)
            case 3:
                keys = do("key list", app=app) or [{"key": "none"}]
                do("key disable", app=app, key=keys[0]["key"])
            case 4:
                made = do("token create", app=app, name=f"token {number}", scopes=["read"], lasts_s=None)
                token = made and made["id"]
            case 5:
                do("token revoke", ids=[token or "none"])
            case 6:
                rule = do("history rule add", app=app, name=f"r{number}", prefix=False, keep=9, seconds=60, replay=0)
            case 7:
                do("history rule remove", app=app, rule=rule["id"] if rule else "none")
            case 8:
                url = f"https://127.0.0.1/{number}"
                hook = do("webhook create", app=app, url=url, events=["all"], format="service", channels=[], pin=False)
            case 9:
                do("webhook disable", id=hook["id"] if hook else "none")
            case 10:
                do("webhook delete", id=hook["id"] if hook else "none")
            case 11:
                do("user create", name=f"user{number}", role="viewer")
        yield


def written(database: Path) -> Counter[tuple[str, str]]:
    """The changes that the records show, as (action, target)."""
    found: Counter[tuple[str, str]] = Counter()
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as store:
        found.update(
            ("app create", name) for (name,) in store.execute("SELECT name FROM apps WHERE name != 'app 4711'")
        )
        settings = store.execute("SELECT name, json_extract(settings, '$.max_batch') FROM apps")
        found.update(("app set", f"{name} {value}") for name, value in settings if value)
        # Each app was created with one key; all others were added.
        keys = store.execute(
            "SELECT key, enabled, number = MIN(number) OVER (PARTITION BY app_id) FROM keys"
        ).fetchall()
        found.update(("key add", key) for key, _, is_first in keys if not is_first)
        found.update(("key disable", key) for key, enabled, _ in keys if not enabled)
        tokens = store.execute("SELECT name, revoked_at FROM tokens").fetchall()
        found.update(("token create", name) for name, _ in tokens)
        found.update(("token revoke", name) for name, revoked in tokens if revoked)
        rules = store.execute(
            "SELECT json_extract(rule.value, '$.name') FROM apps, json_each(settings, '$.history') rule"
        )
        found.update(("history rule", name) for (name,) in rules)
        # The rows of deleted ones are removed a few seconds later.
        hooks = store.execute("SELECT url, disabled_at FROM webhooks WHERE deleted_at IS NULL").fetchall()
        found.update(("webhook create", url) for url, _ in hooks)
        found.update(("webhook disable", url) for url, disabled in hooks if disabled)
        users = store.execute("SELECT name FROM users WHERE name != 'admin'")
        found.update(("user create", name) for (name,) in users)
    return found


def audited(database: Path) -> Counter[tuple[str, str]]:
    """The same, as the audit log shows it."""
    found: Counter[tuple[str, str]] = Counter()
    last_set: dict[str, str] = {}
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as store:
        for action, target, detail in store.execute("SELECT action, target, detail FROM audit ORDER BY number"):
            if action == "app set":
                last_set[target] = detail.rpartition(" ")[2]
            elif action == "history rule add":
                found["history rule", target] += 1
            elif action == "history rule remove":
                found["history rule", target] -= 1
            elif action == "webhook delete":
                found["webhook create", target] -= 1
                found["webhook disable", target] = 0
            else:
                found[action, target] += 1
    found.update(("app set", f"{name} {value}") for name, value in last_set.items())
    # Without the zeros.
    return +found


def test_no_change_is_without_its_row_and_no_row_without_its_change(size: Callable[[int, int], int], figures) -> None:
    # No common factor with the twelve kinds of changes: each kill interrupts another kind than the one before.
    count, every = size(36, 1_000), size(7, 19)
    chance = random.Random(SEED)
    kills = 0
    with Server(workers=1) as server:
        do = Operator(server)
        steps = changes(do, count)
        for number in range(count):
            if number % every != every - 1:
                next(steps)
                continue
            do("app list")
            timer = threading.Timer(chance.random() * WITHIN_S, os.kill, [server.control_pid, signal.SIGKILL])
            timer.start()
            next(steps)
            timer.join()
            kills += 1
        database = server.folder / "data" / "redpoll.sqlite"
        do("app list")
        assert written(database)
        assert audited(database) == written(database)
    heading = "Control plane killed"
    figures.note(heading, f"changes answered, {kills} kills", do.answered, "")
    figures.note(heading, "changes without an answer", do.unanswered, "")
