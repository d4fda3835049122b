"""Django in one file: `REDPOLL_URL=http://KEY:SECRET@127.0.0.1:6001/apps/ID python django_app.py`, then open port 8000.

It has one user, anna, who is logged in by opening the page.
"""

import json
import os
import sys
from pathlib import Path

import django
from django.conf import settings
from django.contrib.auth import get_user_model, login
from django.core.management import call_command, execute_from_command_line
from django.core.wsgi import get_wsgi_application
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.middleware.csrf import get_token
from django.urls import include, path

from redpoll_client.rules import Rules

PAGE = Path(__file__).with_name("page.html").read_text()
OWNERS = {7: "anna", 8: "bert"}
rules = Rules()


@rules.channel("private-order-{order_id:int}")
def order(user, order_id):
    return OWNERS.get(order_id) == user.username


@rules.channel("presence-room-{name}")
async def room(user, name):
    return {"name": user.username.title()}


def page(request: HttpRequest) -> HttpResponse:
    user, _ = get_user_model().objects.get_or_create(username="anna")
    login(request, user, "django.contrib.auth.backends.ModelBackend")
    end = get_publisher().endpoint
    options = {"key": end.key, "host": end.host, "port": end.port, "ssl": end.ssl}
    options["headers"] = {"X-CSRFToken": get_token(request)}
    return HttpResponse(PAGE.replace("SETTINGS", json.dumps(options)))


def welcome(request: HttpRequest) -> HttpResponse:
    get_publisher().send_to_user(str(request.user.pk), "welcome", {"text": f"Welcome, {request.user.username}"})
    return HttpResponse()


@transaction.atomic
def pay(request: HttpRequest, order_id: int) -> HttpResponse:
    # Here the order changes. The event is published once this has committed.
    publish_on_commit(f"private-order-{order_id}", "paid", {"by": request.user.username})
    return HttpResponse()


settings.configure(
    DEBUG=True,
    SECRET_KEY="only for this example",
    ROOT_URLCONF=__name__,
    ALLOWED_HOSTS=["127.0.0.1", "localhost", "testserver"],
    DATABASES={
        "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ.get("EXAMPLE_DB", "example.sqlite3")}
    },
    INSTALLED_APPS=[
        "django.contrib.auth",
        "django.contrib.contenttypes",
        "django.contrib.sessions",
        "redpoll_client.django",
    ],
    MIDDLEWARE=[
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.middleware.csrf.CsrfViewMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
    ],
    # The dotted name of the rules above, also when this file is a program.
    REDPOLL={"rules": f"{__name__}.rules", "idempotency": True},
)
django.setup()

# After the setup: they need the settings.
from redpoll_client.django.configuration import get_publisher  # noqa: E402
from redpoll_client.django.publishing import publish_on_commit  # noqa: E402

urlpatterns = [
    path("", page),
    path("welcome", welcome),
    path("orders/<int:order_id>/pay", pay),
    path("realtime/", include("redpoll_client.django.urls")),
]
application = get_wsgi_application()

if __name__ == "__main__":
    call_command("migrate", verbosity=0)
    execute_from_command_line([sys.argv[0], *(sys.argv[1:] or ["runserver", "--noreload", "8000"])])
