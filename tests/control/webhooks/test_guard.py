"""Addresses that deliveries may go to. Every form of every non-public address is refused, also if a name resolves to
one only later. A listener on loopback checks that no connection is opened."""

import asyncio
import ipaddress
import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.namespaces import may_unshare
from helpers.receiver import Receiver, status
from redpoll.control.webhooks.client import MAX_LOOKUPS, MAX_SLOW_LOOKUPS, Resolver
from redpoll.control.webhooks.guard import AddressRefused, Guard, is_own, literal_address, look_up
from redpoll.control.webhooks.outcomes import Outcome
from redpoll.control.webhooks.sender import PinUnavailable, Sender, Target

PUBLIC = "93.184.215.14"

# Hosts that are this machine or its network, in forms that other guards have missed. `check_url` refuses addresses when
# an endpoint is saved. Names are resolved, and refused, only at an attempt.
HOSTS = [
    "127.0.0.1",
    "127.1",
    "127.0.1",
    "0177.0.0.1",
    "0x7f.0.0.1",
    "0x7f000001",
    "2130706433",
    "017700000001",
    "127.0.0.1.",
    "127.255.255.254",
    "0.0.0.0",
    "0",
    "１２７.０.０.１",
    "①②⑦.⓪.⓪.①",
    "127。0。0。1",
    "[::1]",
    "[0:0:0:0:0:0:0:1]",
    "[::]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[::127.0.0.1]",
    "[64:ff9b::127.0.0.1]",
    "[64:ff9b:1::7f00:1]",
    "[2002:7f00:1::]",
    "[2001:0:7f00:1::1]",
    "[fe80::1]",
    "[fe80::1%25lo]",
    "[fd00::1]",
    "[fd00:ec2::254]",
    "[fec0::1]",
    "[ff02::1]",
    "169.254.169.254",
    "168.63.129.16",
    "100.100.100.200",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.1.1",
    "192.0.0.192",
    "198.18.0.1",
    "224.0.0.1",
    "255.255.255.255",
    "240.0.0.1",
]
# Answers of the test's resolver, such as an attacker's name servers might give.
NAMES = {
    "localhost": ["127.0.0.1", "::1"],
    "localhost.": ["127.0.0.1"],
    "mixed.example": [PUBLIC, "127.0.0.1"],
    "mixed6.example": [PUBLIC, "::1"],
    "inside.example": ["10.1.2.3"],
    "mapped.example": ["::ffff:127.0.0.1"],
    "zone.example": ["fe80::1%lo"],
    "nothing.example": ["not an address"],
}
BAD_URLS = [
    "",
    "hook",
    "//127.0.0.1/",
    "ftp://example.com/",
    "file:///etc/passwd",
    "gopher://127.0.0.1/",
    "unix:///run/redpoll.sock",
    "https://",
    "https:///hook",
    "https://user@example.com/",
    "https://user:password@example.com/",
    "https://example.com@127.0.0.1/",
    "https://127.0.0.1\\@example.com/",
    "https://exa mple.com/",
    "https://example.com/a b",
    "https://example.com/\r\nX: y",
    "https://example.com/\u2028",
    "https://127.0.0.1%00.example.com/",
    "https://%31%32%37.0.0.1/",
    "https://example..com/",
    "https://-example.com/",
    "https://" + "a" * 64 + ".com/",
    "https://[::1/",
    "https://[::1]x/",
    "https://example.com:0/",
    "https://example.com:99999/",
    "https://example.com:port/",
    "https://example.com/" + "x" * 2048,
    "http://example.com/",
]


def run_unshared(folder: Path, script: str, namespace: str, before: str = ""):
    """Runs a script in a new namespace, after the shell commands `before`. Returns the JSON that it prints."""
    path = folder / "main.py"
    path.write_text(f"TESTS = {str(Path(__file__).parents[2])!r}\n" + textwrap.dedent(script))
    found = subprocess.run(
        ["unshare", namespace, "sh", "-ec", f"{before} exec {sys.executable} {path}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


@pytest.fixture
async def make_sender(monkeypatch):
    # The system's CAs take 20 ms to read and are not needed here.
    monkeypatch.setenv("SSL_CERT_FILE", "/dev/null")
    senders = []

    def make(**settings):
        senders.append(Sender(**{"allow_http": True, **settings}))
        return senders[-1]

    yield make
    for sender in senders:
        await sender.close()


async def names(host):
    return NAMES[host]


# -- forms of addresses


@pytest.mark.parametrize("host", HOSTS)
async def test_non_public_address_is_refused_in_every_form_without_a_connection(make_sender, host):
    sender = make_sender()
    async with Receiver() as receiver:
        url = f"http://{host}:{receiver.port}/"
        fault = sender.check_url(url)
        attempt = await sender.attempt(Target(url), b"{}", {})
        with pytest.raises(PinUnavailable):
            await sender.fingerprint(url.replace("http:", "https:"))
    assert fault is not None
    assert "deliveries go to public addresses only" in fault
    assert (attempt.ok, attempt.reason, attempt.outcome) == (False, fault, Outcome.REFUSED)
    assert receiver.connections == 0


@pytest.mark.parametrize("host", HOSTS)
async def test_connecting_is_refused_even_if_the_url_was_not_checked(make_sender, host, monkeypatch):
    """aiohttp resolves no literal addresses, so the socket factory refuses them. `127.1` goes to the real resolver."""
    sender = make_sender()
    monkeypatch.setattr(sender, "check_url", lambda _url: None)
    async with Receiver() as receiver:
        attempt = await sender.attempt(Target(f"http://{host}:{receiver.port}/"), b"{}", {})
    assert not attempt.ok
    assert attempt.outcome in (Outcome.REFUSED, Outcome.RESOLVE, Outcome.BROKEN)
    assert receiver.connections == 0


@pytest.mark.parametrize("host", NAMES)
async def test_name_is_refused_if_any_of_its_addresses_is_not_public(make_sender, host):
    sender = make_sender(resolve=names)
    async with Receiver() as receiver:
        url = f"http://{host}:{receiver.port}/"
        # A name is accepted when it is saved. Its addresses are checked at every connection.
        assert sender.check_url(url) is None
        attempt = await sender.attempt(Target(url), b"{}", {})
        with pytest.raises(PinUnavailable, match="public addresses only"):
            await sender.fingerprint(url.replace("http:", "https:"))
    assert (attempt.ok, attempt.outcome) == (False, Outcome.REFUSED)
    assert attempt.reason.startswith(f"{host} is ")
    assert attempt.reason.endswith("deliveries go to public addresses only")
    assert receiver.connections == 0


async def test_refusal_names_the_host_its_address_and_the_kind_of_address(make_sender):
    attempt = await make_sender(resolve=names).attempt(Target("http://inside.example/"), b"{}", {})
    assert attempt.reason == "inside.example is 10.1.2.3, a private address; deliveries go to public addresses only"


async def test_redirect_to_this_machine_is_not_followed(make_sender):
    sender = make_sender(allow_addresses=["127.0.0.2/32"])
    async with Receiver() as inside:
        location = f"Location: http://127.0.0.1:{inside.port}/"
        async with Receiver(status(302, "", b"", location), host="127.0.0.2") as outside:
            attempt = await sender.attempt(Target(f"http://127.0.0.2:{outside.port}/"), b"{}", {})
    assert (attempt.status, attempt.outcome) == (302, Outcome.REDIRECT)
    assert (len(outside.requests), inside.connections) == (1, 0)


# -- allowed addresses


@pytest.mark.parametrize("address", [PUBLIC, "8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "2a00:1450:4001::200e"])
def test_public_addresses_are_accepted(address):
    assert Guard().fault(address) is None


@pytest.mark.parametrize(
    "url", ["https://example.com/hook", "https://example.com./", "https://bücher.example:8443/?a=b"]
)
async def test_urls_of_public_hosts_are_accepted(make_sender, url):
    assert make_sender(allow_http=False).check_url(url) is None


@pytest.mark.parametrize("url", BAD_URLS)
async def test_invalid_and_plain_http_urls_are_refused_with_a_printable_reason(make_sender, url):
    sender = make_sender(allow_http=False)
    fault = sender.check_url(url)
    assert fault
    assert fault.isprintable()
    assert "\\" not in fault
    attempt = await sender.attempt(Target(url), b"{}", {})
    assert (attempt.ok, attempt.reason, attempt.outcome) == (False, fault, Outcome.REFUSED)


async def test_checking_a_url_never_raises(make_sender):
    sender = make_sender(allow_http=False)
    piece = st.sampled_from(
        ["https://", "http:", "//", "/", "@", ":", "[", "]", "%", "\\", "?", "#", ".", "::1", "127.1"]
    )

    @settings(max_examples=300, deadline=None)
    @given(st.lists(piece | st.text(max_size=4), max_size=8).map("".join))
    def check(url):
        fault = sender.check_url(url)
        assert fault is None or (fault and fault.isprintable())
        if fault is None:
            assert url.lower().startswith("https://")

    check()


async def test_allowed_networks_open_no_other_addresses(make_sender):
    sender = make_sender(allow_addresses=["127.0.0.1/32", "fd00::/8"])
    async with Receiver() as receiver:
        assert (await sender.attempt(Target(receiver.url), b"{}", {})).ok
        refused = await sender.attempt(Target(f"http://[::ffff:127.0.0.1]:{receiver.port}/"), b"{}", {})
    assert refused.outcome is Outcome.REFUSED
    assert receiver.connections == 1
    guard = Guard(["127.0.0.1/32", "fd00::/8"])
    assert guard.fault("fd00::7") is None
    assert guard.fault("127.0.0.2") == "a loopback address"
    assert guard.fault("169.254.169.254") == "a cloud's metadata address"


def test_every_address_that_ipaddress_calls_non_global_is_refused():
    """Compares the table with `ipaddress`, which misses some addresses but none of these."""
    guard = Guard()
    for first in range(256):
        for second in (0, 1, 16, 31, 88, 100, 168, 254, 255):
            address = ipaddress.ip_address(f"{first}.{second}.0.1")
            if not address.is_global or address.is_multicast or address.is_reserved:
                assert guard.fault(str(address)) is not None, address
    for block in range(0, 0x10000, 0x10):
        address = ipaddress.ip_address(f"{block:x}::1")
        if not address.is_global or address.is_multicast or address.is_reserved or not 0x2000 <= block < 0x4000:
            assert guard.fault(str(address)) is not None, address


def test_literal_addresses_are_recognized_in_every_form():
    assert literal_address("127.1") == "127.0.0.1"
    assert (
        literal_address("0x7f000001") == literal_address("2130706433") == literal_address("127.0.0.1.") == "127.0.0.1"
    )
    assert literal_address("::1") == "::1"
    assert literal_address("example.com") is None
    assert literal_address("1.2.3.4.5") is None


def test_refusal_is_an_oserror():
    with pytest.raises(OSError, match=r"^a is 10\.0\.0\.1, a private address; deliveries go to public addresses only$"):
        Guard().check("a", ["8.8.8.8", "10.0.0.1"])
    assert str(AddressRefused("10.0.0.1", "10.0.0.1", "a private address")).startswith("10.0.0.1 is a private address;")


# -- this machine's own public addresses

OWN_ADDRESSES = """
    import asyncio, json, socket, subprocess, sys, time
    sys.path.insert(0, TESTS)
    import uvloop
    from helpers.receiver import Receiver
    from redpoll.control.webhooks.sender import Sender, Target

    PUBLIC = {"93.184.215.14": "93.184.215.14", "2606:2800::1": "[2606:2800::1]"}
    # Without `nodad`, an IPv6 address can't be bound until the kernel has looked for another owner of it.
    adds = [f"address add {address} dev lo" + (" nodad" if ":" in address else "") for address in PUBLIC]
    for command in ("link set lo up", *adds):
        subprocess.run(["ip", *command.split()], check=True)

    def has_route(address):
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            return probe.connect_ex((address, 9)) == 0

    # The kernel makes the route to an IPv6 address a moment after the address.
    while not all(map(has_route, PUBLIC)):
        time.sleep(0.002)

    async def main():
        report = {}
        for address, host in PUBLIC.items():
            async with Receiver(host=address) as receiver:
                for name, allowed in (("refused", []), ("allowed", [address])):
                    async def resolve(host, address=address):
                        return [address]
                    sender = Sender(allow_http=True, allow_addresses=allowed, resolve=resolve)
                    for url in (f"http://{host}:{receiver.port}/", f"http://own.example:{receiver.port}/"):
                        attempt = await sender.attempt(Target(url), b"{}", {})
                        report.setdefault(name, []).append([attempt.ok, attempt.reason])
                    await sender.close()
                report.setdefault("requests", []).append(len(receiver.requests))
        print(json.dumps(report))

    uvloop.run(main())
"""


@pytest.mark.skipif(shutil.which("ip") is None, reason="needs `ip` of iproute2")
@pytest.mark.skipif(not may_unshare("-n"), reason="no network namespace: its loopback gets public addresses")
def test_public_address_of_this_machine_is_refused_unless_it_is_allowed(tmp_path):
    report = run_unshared(tmp_path, OWN_ADDRESSES, "-n")
    assert [ok for ok, _ in report["refused"]] == [False] * 4
    assert [ok for ok, _ in report["allowed"]] == [True] * 4, report["allowed"]
    for _, reason in report["refused"]:
        assert "an address of this machine; deliveries go to public addresses only" in reason
    # Only the allowed sender reached the receivers.
    assert report["requests"] == [2, 2]


def test_own_addresses_are_recognized():
    assert is_own(ipaddress.ip_address("127.0.0.1"))
    assert not is_own(ipaddress.ip_address(PUBLIC))
    assert Guard(own=lambda address: str(address) == PUBLIC).fault(PUBLIC) == "an address of this machine"


# -- names


async def test_name_is_resolved_for_every_connection_and_only_checked_addresses_are_used(make_sender):
    """Rebinding with the test's resolver: first an allowed address, then another. A test below uses the real one."""
    answers = [["127.0.0.2"], ["127.0.0.1"]]
    lookups = []

    async def rebinding(host):
        lookups.append(host)
        return answers.pop(0)

    sender = make_sender(resolve=rebinding, allow_addresses=["127.0.0.2/32"])
    closing = status(200, "", b"", "Connection: close")
    # Other servers of this machine listen on 127.0.0.1, but not on 127.0.0.2: the port that is free here is free there.
    async with Receiver() as inside, Receiver(closing, host="127.0.0.2", port=inside.port) as outside:
        url = f"http://rebinding.example:{outside.port}/"
        first = await sender.attempt(Target(url), b"{}", {})
        second = await sender.attempt(Target(url), b"{}", {})
    assert first.ok
    assert (second.ok, second.outcome) == (False, Outcome.REFUSED)
    assert "rebinding.example is 127.0.0.1, a loopback address" in second.reason
    assert lookups == ["rebinding.example"] * 2
    assert inside.connections == 0
    assert outside.requests[0].headers["host"] == f"rebinding.example:{outside.port}"


async def test_lookups_run_in_daemon_threads_and_do_not_block_each_other(monkeypatch, wait_until):
    """Silent names, enough to fill the thread pool of the loop, and one name that answers."""
    release = threading.Event()
    daemons = []
    real = socket.getaddrinfo

    def getaddrinfo(host, *rest, **named):
        if host.startswith("silent"):
            daemons.append(threading.current_thread().daemon)
            release.wait(120)
            raise socket.gaierror(socket.EAI_AGAIN, "silent")
        return real(host, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    silent = [asyncio.create_task(look_up(f"silent{number}.example")) for number in range(20)]
    # A thread that has started needn't have asked yet.
    await wait_until(lambda: len(daemons) == 20)
    assert "127.0.0.1" in await asyncio.wait_for(look_up("localhost"), 60)
    assert daemons == [True] * 20
    release.set()
    assert {type(error) for error in await asyncio.gather(*silent, return_exceptions=True)} == {socket.gaierror}


async def test_names_that_were_slow_leave_lookups_to_the_others():
    """A hundred names whose servers are silent had all lookups, and deliveries to other names ended unsent."""
    asked, release = [], asyncio.Event()

    async def silent_or_quick(host):
        asked.append(host)
        if host.startswith("silent"):
            await release.wait()
        return [PUBLIC]

    resolver = Resolver(Guard(), silent_or_quick, slow_after_s=0.0)
    names = [f"silent{number}.example" for number in range(MAX_LOOKUPS)]
    release.set()
    await asyncio.gather(*map(resolver.resolve, names))
    release.clear()
    asked.clear()
    waiting = [asyncio.create_task(resolver.resolve(name)) for name in names]
    await asyncio.wait_for(resolver.resolve("quick.example"), 60)
    assert len(asked) == MAX_SLOW_LOOKUPS + 1
    release.set()
    await asyncio.gather(*waiting)
    assert sorted(asked) == sorted([*names, "quick.example"])


async def test_name_with_a_label_that_is_too_long_has_no_address():
    with pytest.raises(socket.gaierror):
        await look_up("x" * 64 + ".example")


# -- rebinding with the system's resolver: a DNS server on loopback and a resolv.conf in a mount namespace

NAME_SERVER = """
    import asyncio, json, socket, struct, sys, threading
    sys.path.insert(0, TESTS)
    import uvloop
    from helpers.receiver import Receiver, status
    from redpoll.control.webhooks.sender import Sender, Target

    # First the receiver's address, then always this machine's, as an attacker's server would answer with a TTL of 0.
    answers, asked = ["127.0.0.2"], []
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.53", 53))

    def serve():
        while True:
            question, client = server.recvfrom(512)
            end = question.index(0, 12) + 5
            kind = struct.unpack("!H", question[end - 4 : end - 2])[0]
            answer = b""
            if kind == 1:
                address = answers.pop(0) if answers else "127.0.0.1"
                asked.append(address)
                answer = b"\\xc0\\x0c" + struct.pack("!HHIH", 1, 1, 0, 4) + socket.inet_aton(address)
            head = question[:2] + struct.pack("!HHHHH", 0x8180, 1, 1 if answer else 0, 0, 0)
            server.sendto(head + question[12:end] + answer, client)

    threading.Thread(target=serve, daemon=True).start()

    async def main():
        sender = Sender(allow_http=True, allow_addresses=["127.0.0.2/32"])
        closing = status(200, "", b"", "Connection: close")
        async with Receiver() as inside, Receiver(closing, host="127.0.0.2", port=inside.port) as outside:
            url = f"http://rebinding.example:{outside.port}/"
            attempts = [await sender.attempt(Target(url), b"{}", {}) for _ in range(3)]
        await sender.close()
        report = {"ok": [a.ok for a in attempts], "reasons": [a.reason for a in attempts], "asked": asked,
                "outside": len(outside.requests), "inside": inside.connections}
        print(json.dumps(report))

    uvloop.run(main())
"""


@pytest.mark.skipif(not may_unshare("-m"), reason="no mount namespace: only the test's resolver rebinds")
def test_rebound_name_is_refused_with_the_system_resolver(tmp_path):
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.53\noptions timeout:30 attempts:1\n")
    (tmp_path / "nsswitch.conf").write_text("hosts: files dns\n")
    mounts = "".join(f"mount --bind {tmp_path}/{name} /etc/{name}; " for name in ("resolv.conf", "nsswitch.conf"))
    report = run_unshared(tmp_path, NAME_SERVER, "-m", mounts)
    assert report["asked"] == ["127.0.0.2", "127.0.0.1", "127.0.0.1"]
    assert report["ok"] == [True, False, False]
    assert (report["outside"], report["inside"]) == (1, 0)
    assert report["reasons"][1].startswith("rebinding.example is 127.0.0.1, a loopback address")
