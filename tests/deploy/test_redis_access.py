"""A Redis that speaks only TLS, and users that may do no more than deploy/README.md "Your own Redis" says.

One server of each kind serves clients with everything that uses Redis; no output of it contains a password.
"""

import json
import re
import sys
from pathlib import Path
from subprocess import run

import pytest

from helpers.certs import authority, issued
from helpers.sentinel import tls_redis
from helpers.server import Server
from helpers.walk import WEBHOOKS, command, pages, walk
from helpers.wire import Socket, eventually
from redpoll.cluster.redis.link import Link
from redpoll.config.settings import Settings

ROOT = Path(__file__).parents[2]
PASSWORD = "hunter2-secret"
# Optional rights, as the page says.
OPTIONAL = ("+info", "+config|get")


def documented_rules() -> list[str]:
    page = (ROOT / "deploy" / "README.md").read_text()
    first, *more = re.findall(r"^    ACL SETUSER redpoll (?:on >PASSWORD )?(.+)$", page, re.MULTILINE)
    return " ".join([first, *more]).split()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certs")
    ca = authority(folder)
    return ca[0], *issued(folder, ca)


@pytest.fixture(scope="module")
def secure_redis(certificates):
    rules = documented_rules()
    least = [rule for rule in rules if rule not in OPTIONAL]
    users = [
        "default on nopass ~* &* +@all",
        f"documented on >{PASSWORD} {' '.join(rules)}".replace("rp:", "documented:"),
        f"least on >{PASSWORD} {' '.join(least)} -script".replace("rp:", "least:"),
    ]
    with tls_redis(*certificates, users=users) as redis:
        yield redis


@pytest.fixture
def fresh_redis(secure_redis):
    """Set as the page says. No user before has loaded a script."""
    with secure_redis.client() as client:
        client.config_set("client-output-buffer-limit", "pubsub 256mb 64mb 60")
        client.script_flush()
    return secure_redis


def settings_of(certificates) -> dict[str, object]:
    ca, cert, key = certificates
    return {"redis_ca_file": ca, "redis_cert_file": cert, "redis_key_file": key}


def url_of(redis, user: str) -> str:
    return f"rediss://{user}:{PASSWORD}@127.0.0.1:{redis.port}"


@pytest.mark.parametrize("user", ["documented", "least"])
async def test_everything_works_over_tls_with_the_documented_rights(fresh_redis, certificates, user):
    url = url_of(fresh_redis, user)
    with Server(workers=2, redis_url=url, redis_prefix=user, **settings_of(certificates), **WEBHOOKS) as server:
        # A channel of which Redis stores nothing but the count; those of the walk have webhooks.
        socket = await Socket.connect(server)
        await socket.subscribe("plain")
        await socket.close()
        await walk(server)
        shown = pages(server) + command(server, "node", "list", "--json") + doctor(server) + server.output()
    assert PASSWORD not in shown
    with fresh_redis.client() as client:
        refused = {entry["object"] for entry in client.execute_command("ACL", "LOG")}
        client.execute_command("ACL", "LOG", "RESET")
    assert refused == (set() if user == "documented" else {"info", "config|get", "script|load"})


def doctor(server: Server) -> str:
    words = [sys.executable, "-m", "redpoll", "doctor", "--json"]
    environment = server.environment() | {"REDPOLL_REDIS_URL": server.redis_url or ""}
    ended = run(words, env=environment, cwd=server.folder, capture_output=True, text=True, timeout=60)
    (finding,) = [finding for finding in json.loads(ended.stdout) if finding["check"] == "Redis"]
    assert finding["verdict"] == "ok", finding
    return ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"redis_ca_file": ""}, "CERTIFICATE_VERIFY_FAILED"),
        ({"redis_cert_file": "", "redis_key_file": ""}, "certificate required"),
        ({"password": "wrong"}, "WRONGPASS"),
    ],
)
async def test_what_is_wrong_with_the_connection_is_logged_without_the_password(
    secure_redis, certificates, change, reason, monkeypatch
):
    change = dict(change)
    password = change.pop("password", PASSWORD)
    files = {name: str(path) for name, path in settings_of(certificates).items()} | change
    url = f"rediss://documented:{password}@127.0.0.1:{secure_redis.port}"
    logged = []
    monkeypatch.setattr("redpoll.cluster.redis.link.log.warning", lambda event, **fields: logged.append(str(fields)))
    link = Link(Settings(redis_url=url, **files).full_redis_url(), first_delay_s=0.01, max_delay_s=0.05)
    link.start()

    # Redis' alert may come after the connection's end was noticed; the next attempt shows it.
    async def named() -> bool:
        return any(reason in line for line in logged)

    await eventually(named, True)
    await link.close()
    assert not any(password in line for line in logged)
