"""The Dockerfile, the compose files and HAProxy's configuration: tools accept them, and they agree with the code."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
import redis as redis_py
import yaml

from helpers.sentinel import wait_until
from redpoll.cli import main
from redpoll.config.setting_table import VARIABLES
from redpoll.config.settings import Settings
from redpoll.host import embedded

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"
COMPOSE = (ROOT / "deploy" / "compose.yaml").read_text()
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")


@pytest.mark.skipif(HADOLINT is None, reason="needs hadolint")
def test_hadolint_finds_no_fault():
    done = subprocess.run([str(HADOLINT), str(DOCKERFILE)], capture_output=True, text=True, timeout=60)
    assert done.stdout == ""
    assert done.returncode == 0


def test_dockerfile_uses_settings_commands_and_ports_that_exist():
    text = DOCKERFILE.read_text()
    assert set(re.findall(r"REDPOLL_[A-Z_]+", text)) <= VARIABLES
    assert f"EXPOSE {Settings().port} {Settings().control_port}" in text
    for words in re.findall(r'^(?:HEALTHCHECK .*\n\s+)?CMD \["(?:redpoll", ")?([a-z]+)"', text, re.MULTILINE):
        assert words in main.list_commands(click.Context(main))


def locked(name: str) -> dict[str, str]:
    """The versions in a lock file, by package. Fails if a package has no hash, or the file names an address."""
    text = (ROOT / "deploy" / name).read_text()
    assert "://" not in text
    entries = re.findall(r"^(\S+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", text, re.MULTILINE)
    assert len(entries) == len(re.findall("==", text))
    return {package: version for package, version, _ in entries}


def fits(requirement: str, versions: dict[str, str]) -> bool:
    """Whether the version of a requirement's package is in its bounds. Markers are those of other Pythons."""
    package, bounds = re.match(r"([A-Za-z0-9_-]+)(?:\[.*\])?([^;]*)", requirement).groups()
    version = [int(part) for part in re.findall(r"\d+", versions[package.lower().replace("_", "-")])]
    for sign, bound in re.findall(r"(>=|<)([\d.]+)", bounds):
        limit = [int(part) for part in bound.split(".")]
        if (version >= limit) != (sign == ">="):
            return False
    return True


def test_image_installs_only_files_with_known_hashes_and_all_that_redpoll_requires():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = declared["project"]["optional-dependencies"]
    required = [*declared["project"]["dependencies"], *extras["embedded"], *extras["otel"], *extras["postgres"]]
    versions = locked("requirements.lock")
    assert [line for line in required if not fits(line, versions)] == []
    building = locked("requirements-build.lock")
    assert [line for line in declared["build-system"]["requires"] if not fits(line, building)] == []
    text = DOCKERFILE.read_text()
    assert "--require-hashes -r requirements.lock -r requirements-build.lock" in text
    assert len(re.findall("pip install", text)) == 2
    assert "--no-index --no-deps --no-build-isolation" in text


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_release_is_signed_with_the_key_that_is_named(tmp_path):
    def run(*words: object, sent: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        given = {**os.environ, **environment}
        return subprocess.run([str(word) for word in words], input=sent, env=given, capture_output=True, text=True)

    dist = tmp_path / "dist"
    dist.mkdir()
    for name in ("a.whl", "a.tar.gz", "a.cdx.json"):
        (dist / name).write_text(name)
    sign = ROOT / "deploy" / "sign-release"
    assert "not signed" in run(sign, dist, REDPOLL_SIGNING_KEY="").stdout
    assert not (dist / "SHA256SUMS.sig").exists()
    assert run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key").returncode == 0
    # Twice: the second release replaces the first one's signature.
    for _ in range(2):
        done = run(sign, dist, REDPOLL_SIGNING_KEY=str(tmp_path / "key"))
        assert done.returncode == 0, done.stderr
    (tmp_path / "signers").write_text(f"release {(tmp_path / 'key.pub').read_text()}")
    verify = ("ssh-keygen", "-Y", "verify", "-f", tmp_path / "signers", "-I", "release", "-n", "redpoll-release")
    sums = (dist / "SHA256SUMS").read_text()
    assert run(*verify, "-s", dist / "SHA256SUMS.sig", sent=sums).returncode == 0
    assert run(*verify, "-s", dist / "SHA256SUMS.sig", sent=sums + "more").returncode != 0
    assert {line.split()[1] for line in sums.splitlines()} == {"a.whl", "a.tar.gz", "a.cdx.json"}


def test_what_the_image_is_built_from_is_not_ignored():
    sources = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE.read_text(), re.MULTILINE)
    shown = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {name for line in sources for name in line.split()} == shown
    assert all((ROOT / name).exists() for name in shown)


def test_compose_publishes_the_control_port_on_loopback_only():
    ports = re.findall(r'^\s+- "([0-9.:]+)"$', COMPOSE, re.MULTILINE)
    assert ports == [f"{Settings().port}:{Settings().port}", f"127.0.0.1:{Settings().control_port}:9601"]
    assert "read_only: true" in COMPOSE


# -- three nodes

CLUSTER = yaml.safe_load((ROOT / "deploy" / "compose-cluster.yaml").read_text())
HAPROXY_CONFIG = (ROOT / "deploy" / "proxies" / "haproxy-cluster.cfg").read_text()
HAPROXY = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin")


OPTIONS_OF_REDIS = {
    "maxmemory-policy": "noeviction",
    "appendonly": "yes",
    "appendfsync": "everysec",
    "client-output-buffer-limit": "normal 0 0 0 slave 268435456 67108864 60 pubsub 268435456 67108864 60",
}


@pytest.mark.parametrize("page", ["compose-cluster.yaml", "README.md"])
def test_passwords_of_the_cluster_have_only_digits_and_letters_because_urls_contain_them(page):
    urls = CLUSTER["services"]["redpoll-1"]["environment"]
    assert "${POSTGRES_PASSWORD:" in urls["REDPOLL_DATABASE_URL"]
    assert "${REDIS_PASSWORD:" in urls["REDPOLL_REDIS_URL"]
    assert "Make each password with `openssl rand -hex 24`" in (ROOT / "deploy" / page).read_text()


def test_haproxy_has_the_nodes_of_the_cluster():
    services = CLUSTER["services"]
    nodes = {name for name, service in services.items() if service["image"] == "redpoll"}
    servers = re.findall(r"^ +server (\S+) (\S+):(\d+)$", HAPROXY_CONFIG, re.MULTILINE)
    assert {(name, name, str(Settings().port)) for name in nodes} == set(servers)
    assert {services[name]["environment"]["REDPOLL_NODE_NAME"] for name in nodes} == nodes
    assert {name.removeprefix("node-") for name in CLUSTER["volumes"] if name.startswith("node-")} == {"1", "2", "3"}


def test_nodes_of_the_cluster_share_stores_and_trust_their_network():
    for name in ("redpoll-1", "redpoll-2", "redpoll-3"):
        environment = CLUSTER["services"][name]["environment"]
        assert set(environment) <= VARIABLES
        assert environment["REDPOLL_REDIS_URL"].endswith("@redis:6379")
        assert environment["REDPOLL_DATABASE_URL"].endswith("@postgres/redpoll")
        (network,) = CLUSTER["networks"]["cluster"]["ipam"]["config"]
        assert environment["REDPOLL_TRUSTED_PROXIES"] == network["subnet"]


def test_only_haproxy_and_on_loopback_the_dashboard_are_published():
    ports = {name: service["ports"] for name, service in CLUSTER["services"].items() if "ports" in service}
    assert ports == {"haproxy": ["6001:80"], "redpoll-1": ["127.0.0.1:9601:9601"]}


def test_redis_of_the_cluster_takes_its_password_from_a_secret_and_not_from_its_command_line(tmp_path):
    service = CLUSTER["services"]["redis"]
    assert service["secrets"] == ["redis_password"]
    assert CLUSTER["secrets"] == {"redis_password": {"environment": "REDIS_PASSWORD"}}
    assert "PASSWORD}" not in str(service)
    # What Compose makes of the command, with this machine's Redis, its secret and its socket in other folders.
    (tmp_path / "redis_password").write_text("a-password")
    (tmp_path / "valkey-server").symlink_to(embedded.find_binary())
    (tmp_path / "docker-entrypoint.sh").write_text('#!/bin/sh\nexec "$@"\n')
    (tmp_path / "docker-entrypoint.sh").chmod(0o755)
    command = [word.replace("$$", "$").replace("/run/secrets", str(tmp_path)) for word in service["command"]]
    lines = f"port 0\nunixsocket {tmp_path}/socket\ndir {tmp_path}\nEND\n"
    command[-1] = command[-1].replace("END\n", lines).replace(f"<<{lines}", "<<END\n")
    server = subprocess.Popen(
        command, env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}, stdout=subprocess.DEVNULL
    )
    try:
        with redis_py.Redis(
            unix_socket_path=f"{tmp_path}/socket", password="a-password", decode_responses=True
        ) as client:
            wait_until(client.ping, "the cluster's Redis didn't answer")
            for name, value in OPTIONS_OF_REDIS.items():
                assert client.config_get(name)[name] == value
            assert client.info("server")["process_id"] == server.pid
        with redis_py.Redis(unix_socket_path=f"{tmp_path}/socket") as stranger, pytest.raises(redis_py.RedisError):
            stranger.ping()
        assert b"a-password" not in Path(f"/proc/{server.pid}/cmdline").read_bytes()
    finally:
        server.kill()
        server.wait()


@pytest.mark.skipif(HAPROXY is None, reason="needs haproxy")
def test_haproxy_accepts_its_configuration(tmp_path):
    # Names resolve in Docker's network only, and Docker's resolver is there too.
    config = tmp_path / "haproxy.cfg"
    config.write_text(re.sub(r"(server \S+) \S+:", r"\1 127.0.0.1:", HAPROXY_CONFIG))
    done = subprocess.run([str(HAPROXY), "-c", "-f", config], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr


def test_its_timeouts_are_longer_than_the_silence_of_an_idle_client():
    timeouts = dict(re.findall(r"^ +timeout (\S+) (\d+)s$", HAPROXY_CONFIG, re.MULTILINE))
    silent_s = Settings().activity_timeout_s + Settings().pong_timeout_s
    assert all(int(timeouts[name]) > silent_s for name in ("client", "server", "tunnel"))
