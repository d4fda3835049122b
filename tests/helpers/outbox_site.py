"""A Django site for tests/redpoll_client: its settings, and a program for the processes of its outbox.

    python outbox_site.py migrate
    python outbox_site.py write COUNT SEED RATE  transactions, a third rolled back, RATE a second (0: without pause);
                                                 prints what was committed, and when
    python outbox_site.py send …                 manage.py redpoll_outbox …

`OUTBOX_DATABASE` is a SQLite file, or `postgres:SOCKET_FOLDER:NAME`. `OUTBOX_LEASE_S` is the lease of a sender. Not a
test.
"""

import json
import os
import random
import sys
import time

from redpoll_client.rules import Rules

_kind, _, _rest = os.environ.get("OUTBOX_DATABASE", "").partition(":")
if _kind == "postgres":
    _folder, _, _name = _rest.partition(":")
    _database = {"ENGINE": "django.db.backends.postgresql", "NAME": _name, "HOST": _folder, "USER": "redpoll"}
else:
    _database = {"ENGINE": "django.db.backends.sqlite3", "NAME": _kind, "OPTIONS": {"timeout": 60}}

DATABASES = {"default": _database}
SECRET_KEY = "tests"
INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "redpoll_client.django",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
]
ROOT_URLCONF = "redpoll_client.django.urls"
USE_TZ = True
REDPOLL = {"idempotency": True, "timeout": 60}
rules = Rules()
CHANNELS = [f"kept-outbox-{number}" for number in range(5)]


def write(count: int, seed: int, rate: float) -> None:
    """Transactions with one or two events each. Prints [data, Unix time of the commit] of each channel, in order."""
    from django.db import transaction

    from redpoll_client.django.publishing import store

    chance = random.Random(seed)
    committed: dict[str, list[tuple[str, float]]] = {channel: [] for channel in CHANNELS}
    began = time.monotonic()
    for number in range(count):
        if rate:
            time.sleep(max(0.0, began + number / rate - time.monotonic()))
        events = [(chance.choice(CHANNELS), f"{seed}-{number}-{part}") for part in range(chance.randint(1, 2))]
        with transaction.atomic():
            for channel, data in events:
                store(channel, "n", data)
            if chance.random() < 1 / 3:
                transaction.set_rollback(True)
                continue
        committed_at = time.time()
        for channel, data in events:
            committed[channel].append((data, committed_at))
    print(json.dumps(committed))


def main() -> None:
    os.environ["DJANGO_SETTINGS_MODULE"] = "helpers.outbox_site"
    import django
    from django.core.management import call_command

    django.setup()
    from redpoll_client.django import outbox

    outbox.LEASE_S = float(os.environ.get("OUTBOX_LEASE_S", outbox.LEASE_S))
    if sys.argv[1] == "migrate":
        call_command("migrate", verbosity=0)
        call_command("makemigrations", check_changes=True, dry_run=True, verbosity=0)
    elif sys.argv[1] == "write":
        write(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
    else:
        call_command("redpoll_outbox", *sys.argv[2:])


if __name__ == "__main__":
    main()
