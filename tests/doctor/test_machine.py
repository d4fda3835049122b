import os
import tempfile
import time
from pathlib import Path

import pytest
from redis.asyncio import Redis

from helpers.certs import authority, issued, self_signed
from helpers.ports import reserved_ports
from helpers.redis_data import REDIS_8, written
from helpers.sentinel import redis_cluster
from redpoll import _openssl
from redpoll.config import config
from redpoll.doctor import capacity, machine
from redpoll.doctor.report import Verdict
from redpoll.host import datafolder


@pytest.fixture
def now_s() -> float:
    """The second in which the test began. Certificates are made later, and know seconds only."""
    return float(int(time.time()))


def settings(**changes):
    return config.load({name: str(value) for name, value in changes.items()}, {}, None, read_files=False)[0]


def test_versions_name_the_packages_that_matter():
    finding = machine.versions()
    assert finding.verdict is Verdict.OK
    assert "uvloop" in finding.seen


@pytest.mark.parametrize(("hard", "verdict"), [(1024, Verdict.WARNING), (1_048_576, Verdict.OK)])
def test_few_descriptors_are_a_warning_with_the_number_of_connections(hard, verdict):
    finding = machine.files(1024, hard, 1_048_576)
    assert finding.verdict is verdict
    # 95 %, less 64, as in worker/main.py.
    assert verdict is Verdict.OK or "a worker holds 908 connections" in finding.cause


@pytest.mark.parametrize(("somaxconn", "verdict"), [(128, Verdict.WARNING), (4096, Verdict.OK)])
def test_a_short_backlog_is_a_warning(somaxconn, verdict):
    assert machine.backlog(somaxconn).verdict is verdict


@pytest.mark.parametrize(("workers", "verdict"), [(0, Verdict.OK), (4, Verdict.OK), (5, Verdict.WARNING)])
def test_more_workers_than_cpus_are_a_warning(workers, verdict):
    assert machine.memory(8 << 30, 4, workers).verdict is verdict


async def test_the_memory_is_that_which_this_process_may_use(tmp_path, monkeypatch):
    monkeypatch.setattr(capacity, "usable_memory", lambda: 3 << 30)
    (finding,) = (one for one in await machine.examine(settings(data_dir=tmp_path)) if one.check == "Machine")
    assert finding.seen.startswith("3.0 GiB")


def test_a_nearly_full_disk_is_a_warning(tmp_path):
    assert machine.disk(tmp_path / "data", 1 << 20).verdict is Verdict.WARNING
    assert machine.disk(tmp_path / "data", 1 << 40).verdict is Verdict.OK


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who alone can act as somebody else")
def test_a_folder_of_another_user_is_left_to_its_server():
    # Not below tmp_path, which is closed to other users.
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        base.chmod(0o755)
        mine, closed, theirs = (base / part for part in ("mine", "closed", "theirs"))
        for folder, owner in ((mine, 65_534), (closed, 65_534), (theirs, 60_001)):
            folder.mkdir(0o700)
            os.chown(folder, owner, owner)
        closed.chmod(0o500)
        with datafolder.as_owner(mine):
            found = [machine.disk(folder, 1 << 40) for folder in (mine, theirs, theirs / "data", closed, base / "new")]
    assert [one.verdict for one in found] == [Verdict.OK] + [Verdict.FAILED] * 4
    assert [one.remedy for one in found[1:]] == [
        ("run redpoll doctor as user 60001 or as root",),
        ("run redpoll doctor as the server's user or as root",),
        (f"chmod u+rwx {closed}",),
        (f"as root, if a server of this user needs it: install -d -m 700 -o 65534 {base / 'new'}",),
    ]


@pytest.mark.parametrize(("state", "verdict"), [(0, Verdict.OK), (5, Verdict.WARNING), (None, Verdict.SKIPPED)])
def test_an_unsynchronised_clock_is_a_warning(state, verdict):
    assert machine.clock(state).verdict is verdict


def test_a_key_of_another_certificate_fails(tmp_path, now_s):
    cert, key = self_signed(tmp_path, "one", days=90)
    _, other = self_signed(tmp_path, "other")
    good = machine.certificates(settings(tls_port=0, tls_cert=cert, tls_key=key), now_s)[0]
    assert good.verdict is Verdict.OK
    assert "ECDSA for localhost, 127.0.0.1, valid until 2" in good.seen
    (bad,) = machine.certificates(settings(tls_port=0, tls_cert=cert, tls_key=other), now_s)
    assert bad.verdict is Verdict.FAILED
    assert "is not the key of the certificate" in bad.seen
    (none,) = machine.certificates(settings(), now_s)
    assert none.verdict is Verdict.SKIPPED


def test_each_certificate_of_a_folder_is_judged(tmp_path, now_s):
    ca = authority(tmp_path)
    for name, days in (("expired", -1), ("nearly", 5), ("good", 90)):
        issued(tmp_path, ca, name, hosts=(f"{name}.example.com",), days=days)
    self_signed(tmp_path, "nameless", hosts=())
    ca[1].unlink()
    found = machine.certificates(settings(tls_port=0, tls_cert=tmp_path, public_url="https://x.example.com"), now_s)
    seen = {finding.seen.split(" ")[0].rpartition("/")[2]: finding for finding in found}
    assert seen["good.crt"].verdict is Verdict.OK
    assert (seen["nearly.crt"].verdict, seen["nearly.crt"].cause) == (Verdict.WARNING, "it expires in 5 days")
    assert (seen["expired.crt"].verdict, seen["expired.crt"].cause[:14]) == (Verdict.FAILED, "it has expired")
    assert (seen["nameless.crt"].verdict, seen["nameless.crt"].cause[:16]) == (Verdict.FAILED, "it names no host")
    assert seen["authority.crt'"].verdict is Verdict.WARNING
    assert any("no certificate is for x.example.com" in finding.seen for finding in found)


def test_a_certificate_that_isnt_valid_yet_fails(tmp_path, now_s):
    cert, key = self_signed(tmp_path)
    found = machine.certificates(settings(tls_port=0, tls_cert=cert, tls_key=key), now_s - 86_400)[0]
    assert found.verdict is Verdict.FAILED
    assert "isn't valid yet" in found.cause


def test_a_python_with_openssl_linked_in_is_named(tmp_path, monkeypatch, now_s):
    monkeypatch.setattr(_openssl, "missing", lambda: "OpenSSL is linked into Python itself")
    cert, key = self_signed(tmp_path)
    found = machine.certificates(settings(tls_port=0, tls_cert=cert, tls_key=key), now_s)[-1]
    assert found.verdict is Verdict.WARNING
    assert "OpenSSL is linked into Python itself" in found.seen
    assert found.remedy


async def test_without_a_program_for_the_data_each_remedy_is_a_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    place = settings(data_dir=tmp_path)
    (found,) = await machine.redis_server(place)
    assert found.verdict is Verdict.OK
    assert found.seen.startswith("embedded:")
    written(tmp_path / "redis", REDIS_8)
    (finding,) = await machine.redis_server(place)
    assert finding.verdict is Verdict.FAILED
    assert "which Redis 8.0.2 wrote" in finding.cause
    assert [line.split()[0] for line in finding.remedy] == ["install", "move"]


async def test_an_unreachable_redis_fails_and_its_password_is_not_shown():
    with reserved_ports(1) as (port,):
        (finding,) = await machine.redis_server(settings(redis_url=f"redis://user:hunter2@127.0.0.1:{port}"))
    assert finding.verdict is Verdict.FAILED
    assert str(port) in finding.seen
    assert "hunter2" not in repr(finding)


async def test_a_cluster_with_a_node_that_is_away_is_no_failure():
    with redis_cluster(2, replicated=False, node_timeout_ms=60_000) as cluster, reserved_ports(1) as (port,):
        url = cluster.url.replace("://", f"://127.0.0.1:{port},")
        away, *others = await machine.redis_server(settings(redis_url=url))
        cluster.close()
        (lost,) = await machine.redis_server(settings(redis_url=url))
    assert away.verdict is Verdict.WARNING
    assert away.seen.startswith(f"127.0.0.1:{port}: ")
    assert {finding.verdict for finding in others} <= {Verdict.OK, Verdict.WARNING}, others
    assert lost.verdict is Verdict.FAILED


async def configured(server, *command):
    """The server's version, after this command. Its buffers are as in the embedded Redis."""
    async with Redis(unix_socket_path=server.path, decode_responses=True) as client:
        await client.config_set("client-output-buffer-limit", "pubsub 256mb 64mb 60")
        if command:
            await client.execute_command(*command)
        info = await client.info("server")
    return info.get("valkey_version", info["redis_version"])


async def test_a_redis_that_answers_is_named_with_its_version(own_redis, capsys):
    version = await configured(own_redis)
    (finding,) = await machine.redis_server(settings(redis_url=own_redis.url))
    assert finding.verdict is Verdict.OK, finding
    assert finding.seen.split()[1] == version
    # The findings are all that the command prints.
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("rules", [("~other:*", "+@all"), ("~other:*", "+@all", "-info")])
async def test_a_redis_with_which_serve_does_not_start_fails(own_redis, rules):
    await configured(own_redis, "ACL", "SETUSER", "poor", "on", ">pass", "&*", *rules)
    (finding,) = await machine.redis_server(settings(redis_url=f"{own_redis.url}?username=poor&password=pass"))
    assert finding.verdict is Verdict.FAILED
    assert "may not use SET" in finding.seen
    assert "~rp:* &rp:*" in finding.seen


async def test_the_prefix_of_the_settings_is_tried(own_redis):
    await configured(own_redis, "ACL", "SETUSER", "shared", "on", ">pass", "~mine:*", "&mine:*", "+@all")
    url = f"{own_redis.url}?username=shared&password=pass"
    (finding,) = await machine.redis_server(settings(redis_url=url, redis_prefix="mine"))
    assert finding.verdict is Verdict.OK, finding


async def test_each_unsuitable_setting_of_redis_is_a_warning(own_redis):
    await configured(own_redis, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    (evicts,) = await machine.redis_server(settings(redis_url=own_redis.url))
    assert evicts.verdict is Verdict.WARNING
    assert "maxmemory-policy is allkeys-lru" in evicts.seen
    await configured(own_redis, "CONFIG", "SET", "client-output-buffer-limit", "pubsub 32mb 8mb 60")
    found = await machine.redis_server(settings(redis_url=own_redis.url))
    assert [finding.verdict for finding in found] == [Verdict.WARNING, Verdict.WARNING]
    assert "client-output-buffer-limit" in found[1].seen


async def test_a_replica_fails_because_serve_does_not_connect_to_it(own_redis):
    with reserved_ports(1) as (port,):
        await configured(own_redis, "REPLICAOF", "127.0.0.1", str(port))
        (finding,) = await machine.redis_server(settings(redis_url=own_redis.url))
    assert finding.verdict is Verdict.FAILED
    assert finding.seen.endswith("the server is a replica")


async def test_every_check_reports(tmp_path):
    findings = await machine.examine(settings(data_dir=tmp_path))
    assert len(findings) == 10
    assert all(finding.seen for finding in findings)
