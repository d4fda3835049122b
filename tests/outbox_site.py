"""A Django site for tests/redpoll_client: its settings, and a program for the processes of its outbox.

    python outbox_site.py migrate
    python outbox_site.py write COUNT SEED       transactions, a third rolled back; prints what was committed
    python outbox_site.py send …                 manage.py redpoll_outbox …

`OUTBOX_DATABASE` is a SQLite file, or `postgres:SOCKET_FOLDER:NAME`. Not a test.
"""

import json
import os
import random
import sys

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


def write(count: int, seed: int) -> None:
    """Transactions with one or two events each. Prints the committed data of each channel, in order."""
    from django.db import transaction

    from redpoll_client.django.publishing import store

    chance = random.Random(seed)
    committed: dict[str, list[str]] = {channel: [] for channel in CHANNELS}
    for number in range(count):
        events = [(chance.choice(CHANNELS), f"{number}-{part}") for part in range(chance.randint(1, 2))]
        with transaction.atomic():
            for channel, data in events:
                store(channel, "n", data)
            if chance.random() < 1 / 3:
                transaction.set_rollback(True)
                continue
        for channel, data in events:
            committed[channel].append(data)
    print(json.dumps(committed))


def main() -> None:
    os.environ["DJANGO_SETTINGS_MODULE"] = "outbox_site"
    import django
    from django.core.management import call_command

    django.setup()
    from redpoll_client.django import outbox

    # So that the test needn't wait long for a killed sender's lease.
    outbox.LEASE_S = 1.0
    if sys.argv[1] == "migrate":
        call_command("migrate", verbosity=0)
        call_command("makemigrations", check_changes=True, dry_run=True, verbosity=0)
    elif sys.argv[1] == "write":
        write(int(sys.argv[2]), int(sys.argv[3]))
    else:
        call_command("redpoll_outbox", *sys.argv[2:])


if __name__ == "__main__":
    main()
