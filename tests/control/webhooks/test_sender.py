"""Single attempts at correct, slow, broken and hostile receivers, over real sockets and TLS."""

import asyncio
import gzip
import hashlib
import random
import resource
import socket
import ssl
import time

import pytest

from helpers.certs import authority, issued, self_signed
from helpers.ports import reserved_ports
from helpers.receiver import OK, Receiver, hang, reset, status
from redpoll.control.webhooks.client import Client
from redpoll.control.webhooks.outcomes import Outcome
from redpoll.control.webhooks.sender import PinUnavailable, Sender, Target

LOOPBACK = ("127.0.0.0/8", "::1/128")
BODY = b'{"event":"channel.vacated"}'
NOT_HTTP = "the answer is not HTTP, or its head is longer than 8 KiB"
HEADERS = {"Content-Type": "application/json", "X-Service-Delivery": "d1"}


@pytest.fixture
async def make_sender(monkeypatch):
    """`make_sender(**settings)`: a Sender that may send to loopback, with or without TLS. Closed after the test."""
    # The system's CAs take 20 ms to read and are not needed here.
    monkeypatch.setenv("SSL_CERT_FILE", "/dev/null")
    senders = []

    def make(**settings):
        senders.append(Sender(**{"allow_http": True, "allow_addresses": LOOPBACK, **settings}))
        return senders[-1]

    yield make
    for sender in senders:
        await sender.close()


@pytest.fixture
async def sender(make_sender):
    return make_sender()


@pytest.fixture
def time_limits(monkeypatch):
    """The attempts' time limits, in the order in which they began. They end only when the test says so, at the stage
    that it waits for."""
    limits, real = [], asyncio.timeout

    def begin(delay):
        limit = real(None)
        if delay is not None:
            limits.append(limit)
        return limit

    monkeypatch.setattr(asyncio, "timeout", begin)
    return limits


async def send(sender, url, pin=""):
    return await sender.attempt(Target(url, pin), BODY, HEADERS)


# -- requests


async def test_body_and_headers_arrive_unchanged(sender):
    async with Receiver() as receiver:
        attempt = await send(sender, receiver.url + "/a%2Fb?c=%2F&d=+")
    (request,) = receiver.requests
    assert (attempt.ok, attempt.status, attempt.reason, attempt.response) == (True, 200, "200 OK", b"ok")
    assert attempt.outcome is Outcome.DELIVERED
    assert (request.method, request.target, request.body) == ("POST", "/hook/a%2Fb?c=%2F&d=+", BODY)
    assert request.headers["content-type"] == "application/json"
    assert request.headers["x-service-delivery"] == "d1"
    assert request.headers["host"] == f"127.0.0.1:{receiver.port}"
    assert request.headers["content-length"] == str(len(BODY))


async def test_proxies_and_netrc_of_the_environment_are_ignored(make_sender, monkeypatch, tmp_path):
    async with Receiver() as proxy, Receiver() as receiver:
        (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password secret\n")
        monkeypatch.setenv("HOME", str(tmp_path))
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        attempt = await send(make_sender(), receiver.url)
    assert attempt.ok
    assert proxy.connections == 0
    assert "authorization" not in receiver.requests[0].headers


async def test_cookies_are_not_sent_back(sender):
    async with Receiver(status(200, "OK", b"", "Set-Cookie: a=b")) as receiver:
        await send(sender, receiver.url)
        await send(sender, receiver.url)
    assert [("cookie" in request.headers) for request in receiver.requests] == [False, False]


async def test_deliveries_share_a_connection(sender):
    async with Receiver() as receiver:
        for _ in range(3):
            assert (await send(sender, receiver.url)).ok
    assert (receiver.connections, len(receiver.requests)) == (1, 3)


async def test_hanging_receivers_do_not_delay_others(make_sender):
    sender = make_sender(timeout_s=60.0)
    async with Receiver(hang) as hanging, Receiver() as receiver:
        waiting = [asyncio.create_task(send(sender, hanging.url)) for _ in range(150)]
        while len(hanging.requests) < len(waiting):
            await asyncio.sleep(0.01)
        attempt = await send(sender, receiver.url)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    assert attempt.ok


async def test_request_is_repeated_if_a_pooled_connection_was_closed(sender):
    async def once(request, writer):
        if request.connection == 1 and len(receiver.requests) > 1:
            # The second request gets no answer: the receiver closes the connection.
            writer.transport.abort()
        else:
            writer.write(OK)

    async with Receiver(once) as receiver:
        assert (await send(sender, receiver.url)).ok
        assert (await send(sender, receiver.url)).ok
    assert [request.connection for request in receiver.requests] == [1, 1, 2]


# -- answers


@pytest.mark.parametrize("code", [200, 201, 202, 204, 299])
async def test_any_2xx_is_success(sender, code):
    async with Receiver(status(code)) as receiver:
        attempt = await send(sender, receiver.url)
    assert (attempt.ok, attempt.status, attempt.outcome) == (True, code, Outcome.DELIVERED)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (400, "answered 400 Bad Request"),
        (500, "answered 500 Internal Server Error"),
        (503, "answered 503 Service Unavailable"),
        (599, "answered 599"),
    ],
)
async def test_other_status_is_a_failure_with_a_standard_phrase(sender, code, reason):
    async with Receiver(status(code, "<b>believe me</b>", b"why")) as receiver:
        attempt = await send(sender, receiver.url)
    assert attempt[:3] == (False, code, reason)
    assert (attempt.response, attempt.outcome) == (b"why", Outcome.STATUS)


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
async def test_redirects_are_not_followed(sender, code):
    async with Receiver() as elsewhere, Receiver(status(code, "", b"", f"Location: {elsewhere.url}")) as receiver:
        attempt = await send(sender, receiver.url)
    assert elsewhere.connections == 0
    assert (attempt.ok, attempt.outcome) == (False, Outcome.REDIRECT)
    assert attempt.reason.endswith("redirects are not followed")


async def test_first_kib_of_the_answer_is_stored_and_the_connection_reused(sender):
    async with Receiver(status(500, "", b"x" * 5000)) as receiver:
        attempt = await send(sender, receiver.url)
        await send(sender, receiver.url)
    assert attempt.response == b"x" * 1024
    assert receiver.connections == 1


async def test_compressed_answer_is_not_decompressed(sender):
    bomb = gzip.compress(bytes(1 << 24))
    async with Receiver(status(200, "", bomb, "Content-Encoding: gzip")) as receiver:
        attempt = await send(sender, receiver.url)
    assert receiver.requests[0].headers["accept-encoding"] == "identity"
    assert (attempt.ok, attempt.response) == (True, bomb[:1024])


@pytest.mark.parametrize("head", [b"Transfer-Encoding: chunked\r\n\r\n", b"\r\n"], ids=["chunked", "until the end"])
async def test_endless_body_is_cut_and_the_status_counts(sender, head):
    async def endless(_request, writer):
        writer.write(b"HTTP/1.1 200 OK\r\n" + head)
        while True:
            writer.write(b"1000\r\n" + b"x" * 4096 + b"\r\n")
            await writer.drain()

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with Receiver(endless) as receiver:
        attempt = await send(sender, receiver.url)
    assert (attempt.ok, len(attempt.response)) == (True, 1024)
    assert attempt.reason == "200 OK; the beginning of its body was kept"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16_384


async def test_slow_endless_body_is_read_for_at_most_a_second(sender):
    async def dripping(_request, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        while True:
            writer.write(b"x")
            await asyncio.sleep(0.1)

    async with Receiver(dripping) as receiver:
        attempt = await send(sender, receiver.url)
    assert (attempt.ok, attempt.status) == (True, 200)
    # Without the limit of a second, the sender's own of 10 s would end it.
    assert 900 < attempt.duration_ms < 9_000


# -- broken receivers


async def test_attempt_times_out_if_the_receiver_never_answers(make_sender, time_limits, wait_until):
    async with Receiver(hang) as receiver:
        sending = asyncio.create_task(send(make_sender(timeout_s=1.0), receiver.url))
        await wait_until(lambda: receiver.requests)
        time_limits[0].reschedule(0.0)
        attempt = await sending
    assert (attempt.ok, attempt.status, attempt.outcome) == (False, None, Outcome.TIMEOUT)
    assert attempt.reason == "no answer within 1 s"


async def test_late_answer_within_the_time_limit_is_a_success(make_sender):
    async def late(_request, writer):
        await asyncio.sleep(0.5)
        writer.write(OK)

    async with Receiver(late) as receiver:
        attempt = await send(make_sender(timeout_s=60.0), receiver.url)
    assert attempt.ok
    assert attempt.duration_ms >= 490


async def test_default_time_limit_of_an_attempt_is_ten_seconds(make_sender, monkeypatch):
    asked = []
    real = asyncio.timeout
    monkeypatch.setattr(asyncio, "timeout", lambda delay: asked.append(delay) or real(delay))
    async with Receiver() as receiver:
        await send(make_sender(), receiver.url)
    assert asked[0] == 10.0


async def test_attempt_times_out_if_the_receiver_reads_nothing(make_sender, time_limits):
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        sending = asyncio.create_task(make_sender(timeout_s=1.0).attempt(Target(url), bytes(1 << 24), HEADERS))
        accepted, _ = await loop.sock_accept(listener)
        with accepted:
            await loop.sock_recv(accepted, 1)
            time_limits[0].reschedule(0.0)
            attempt = await sending
    assert (attempt.outcome, attempt.reason) == (Outcome.TIMEOUT, "no answer within 1 s")


async def test_attempt_times_out_in_an_endless_tls_handshake(make_sender, time_limits):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]
        sending = asyncio.create_task(send(make_sender(timeout_s=0.3), f"https://localhost:{port}/"))
        accepted, _ = await asyncio.get_running_loop().sock_accept(listener)
        with accepted:
            time_limits[0].reschedule(0.0)
            attempt = await sending
    assert (attempt.outcome, attempt.reason) == (Outcome.TIMEOUT, f"no connection to localhost:{port} within 0.3 s")


async def test_attempt_times_out_if_the_name_never_resolves(make_sender, time_limits, wait_until):
    asked = []

    async def never(host):
        asked.append(host)
        return await asyncio.get_running_loop().create_future()

    sender = make_sender(timeout_s=0.2, resolve=never)
    sending = asyncio.gather(send(sender, "http://a.test/"), send(sender, "http://a.test/"))
    await wait_until(lambda: asked and len(time_limits) == 2)
    for limit in time_limits:
        limit.reschedule(0.0)
    attempts = await sending
    assert {attempt.reason for attempt in attempts} == {"no address of a.test was found within 0.2 s"}
    assert {attempt.outcome for attempt in attempts} == {Outcome.TIMEOUT}
    assert asked == ["a.test"]


async def test_name_without_an_address_has_its_own_outcome(make_sender):
    async def unknown(_host):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    attempt = await send(make_sender(resolve=unknown), "http://a.test/")
    assert attempt.outcome is Outcome.RESOLVE
    assert attempt.reason == "no address of a.test is known: Name or service not known"


async def test_refused_connection_has_its_own_outcome(sender):
    with reserved_ports(1) as (port,):
        attempt = await send(sender, f"http://127.0.0.1:{port}/")
    assert attempt.outcome is Outcome.CONNECT
    assert attempt.reason == f"no connection to 127.0.0.1:{port}: Connection refused"


async def test_connection_reset_is_one_failed_attempt(sender):
    async with Receiver(reset) as receiver:
        attempt = await send(sender, receiver.url)
    assert (attempt.status, attempt.outcome) == (None, Outcome.BROKEN)
    assert attempt.reason.startswith(("the receiver closed the connection", "the connection broke before an answer"))
    assert len(receiver.requests) == 1


async def test_connection_closed_without_an_answer_is_a_failure(sender):
    async def close(_request, writer):
        writer.close()

    async with Receiver(close) as receiver:
        attempt = await send(sender, receiver.url)
    assert attempt[:3] == (False, None, "the receiver closed the connection without an answer")


@pytest.mark.parametrize(
    ("garbage", "reason"),
    [
        (b"<script>alert(1)</script>\r\n\r\n", NOT_HTTP),
        (random.Random(1).randbytes(4096), NOT_HTTP),
        (b"HTTP/1.1 abc\r\n\r\n", NOT_HTTP),
        (b"HTTP/1.1 99999 OK\r\n\r\n", NOT_HTTP),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", NOT_HTTP),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000, NOT_HTTP),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000 + b"\r\n", NOT_HTTP),
        (b"HTTP/1.1 200 O", "the receiver closed the connection without an answer"),
    ],
)
async def test_invalid_http_is_a_failure_and_is_not_quoted(sender, garbage, reason):
    async def answer(_request, writer):
        writer.write(garbage)
        await writer.drain()
        writer.close()

    async with Receiver(answer) as receiver:
        attempt = await send(sender, receiver.url)
    assert attempt[:3] == (False, None, reason)
    assert attempt.outcome is Outcome.BROKEN


@pytest.mark.parametrize(
    "flood",
    [b"HTTP/1.1 100 Continue\r\n\r\n" * 1000, b"HTTP/1.1 102 \r\n\r\n", b"X: y\r\n" * 1000, b"\r\n" * 4096],
)
async def test_endless_head_ends_the_attempt_long_before_its_time_limit(make_sender, flood):
    async def answer(_request, writer):
        if flood.startswith(b"X"):
            writer.write(b"HTTP/1.1 200 OK\r\n")
        while not writer.is_closing():
            writer.write(flood)
            await writer.drain()

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with Receiver(answer) as receiver:
        attempt = await send(make_sender(timeout_s=60.0), receiver.url)
    assert (attempt.outcome, attempt.reason) == (Outcome.BROKEN, NOT_HTTP)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32_768


async def test_some_informational_answers_and_a_long_body_in_one_read_are_usual(sender):
    body = b"x" * 200_000
    async with Receiver(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 16 + status(200, "OK", body)) as receiver:
        attempt = await send(sender, receiver.url)
    assert (attempt.outcome, attempt.response) == (Outcome.DELIVERED, body[:1024])


@pytest.mark.parametrize("unasked", [b"HTTP/1.1 102 \r\n\r\n", status(200, "OK", b"no")])
async def test_connection_with_an_answer_that_nothing_asked_for_is_closed(
    make_sender, monkeypatch, wait_until, unasked
):
    monkeypatch.setattr("redpoll.control.webhooks.client._IDLE_S", 600.0)
    sender, writers = make_sender(), []

    async def answer(_request, writer):
        writers.append(writer)
        writer.write(OK)

    async with Receiver(answer) as receiver:
        assert (await send(sender, receiver.url)).ok
        writers[0].write(unasked)
        await wait_until(writers[0].is_closing)
        assert (await send(sender, receiver.url)).response == b"ok"
    assert [request.connection for request in receiver.requests] == [1, 2]


async def test_internal_error_becomes_an_outcome(sender, monkeypatch):
    async def broken(*_arguments):
        raise LookupError("a bug")

    monkeypatch.setattr(Client, "post", broken)
    attempt = await send(sender, "http://127.0.0.1:1/")
    assert (attempt.ok, attempt.outcome) == (False, Outcome.INTERNAL)


async def test_cancelled_attempt_raises_and_its_connection_is_not_reused(sender):
    async with Receiver(hang) as receiver:
        task = asyncio.create_task(send(sender, receiver.url))
        while not receiver.requests:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        receiver.answer = OK
        assert (await send(sender, receiver.url)).ok
    assert receiver.connections == 2


# -- TLS and pins


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """An authority, certificates of it (two for localhost, one for another name, one expired), a self-signed one."""
    folder = tmp_path_factory.mktemp("certs")
    ca = authority(folder)
    return {
        "ca": ca,
        "first": issued(folder, ca, "first"),
        "second": issued(folder, ca, "second"),
        "elsewhere": issued(folder, ca, "elsewhere", hosts=["example.com"]),
        "expired": issued(folder, ca, "expired", days=-1),
        "stranger": self_signed(folder, "stranger"),
    }


@pytest.fixture
async def tls_sender(make_sender, pairs):
    """A production configuration: no plain http, and a private CA in a file."""
    return make_sender(allow_http=False, ca_file=str(pairs["ca"][0]))


def sha256_of(pair):
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pair[0].read_text())).hexdigest()


async def test_host_header_over_tls_is_the_name(tls_sender, pairs):
    async with Receiver(tls=pairs["first"]) as receiver:
        assert (await send(tls_sender, receiver.url)).ok
    assert receiver.requests[0].headers["host"] == f"localhost:{receiver.port}"


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        ("stranger", "self-signed certificate"),
        ("expired", "certificate has expired"),
        ("elsewhere", "Hostname mismatch, certificate is not valid for 'localhost'"),
    ],
)
async def test_nothing_is_sent_if_the_certificate_is_not_accepted(tls_sender, pairs, shown, reason):
    async with Receiver(tls=pairs[shown]) as receiver:
        attempt = await send(tls_sender, receiver.url)
    assert attempt.outcome is Outcome.TLS
    assert attempt.reason == f"the certificate of localhost is not accepted: {reason}; nothing was sent"
    assert receiver.bytes_read == 0


async def test_nothing_is_sent_if_the_server_does_not_speak_tls(tls_sender):
    async def answer(_request, writer):
        writer.write(OK)

    async with Receiver(answer) as receiver:
        server = await asyncio.start_server(lambda _, writer: writer.write(b"HTTP/1.1 400 No\r\n\r\n"), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        attempt = await send(tls_sender, f"https://localhost:{port}/")
        server.close()
    assert receiver.bytes_read == 0
    assert attempt.outcome is Outcome.TLS
    assert attempt.reason == f"no TLS connection to localhost:{port}: wrong version number; nothing was sent"


async def test_fingerprint_is_that_of_the_leaf_and_needs_no_request(tls_sender, pairs):
    async with Receiver(tls=pairs["first"]) as receiver:
        assert await tls_sender.fingerprint(receiver.url) == sha256_of(pairs["first"])
    assert receiver.bytes_read == 0


@pytest.mark.parametrize("shown", ["stranger", "expired", "elsewhere"])
async def test_fingerprint_is_refused_if_the_certificate_is_not_accepted(tls_sender, pairs, shown):
    async with Receiver(tls=pairs[shown]) as receiver:
        with pytest.raises(PinUnavailable, match="the certificate of localhost is not accepted"):
            await tls_sender.fingerprint(receiver.url)


async def test_fingerprint_is_refused_if_no_certificate_can_be_read(make_sender):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(PinUnavailable, match=r"no connection to localhost:\d+ within 0\.2 s"):
            await make_sender(timeout_s=0.2).fingerprint(f"https://localhost:{port}/")
    sender = make_sender()
    with reserved_ports(1) as (port,), pytest.raises(PinUnavailable, match="Connection refused"):
        await sender.fingerprint(f"https://localhost:{port}/")
    with pytest.raises(PinUnavailable, match="no certificate to pin on an http:// URL"):
        await sender.fingerprint("http://example.com/")
    with pytest.raises(PinUnavailable, match="a private address"):
        await sender.fingerprint("https://10.0.0.1/")


async def test_delivery_succeeds_with_the_pinned_certificate(tls_sender, pairs):
    async with Receiver(tls=pairs["first"]) as receiver:
        pin = await tls_sender.fingerprint(receiver.url)
        assert (await send(tls_sender, receiver.url, pin)).ok
        assert (await send(tls_sender, receiver.url, pin)).ok
    assert {request.connection for request in receiver.requests} == {receiver.requests[0].connection}


async def test_nothing_is_sent_if_the_pinned_certificate_changed(tls_sender, pairs):
    async with Receiver(tls=pairs["first"], answer=status(200, "", b"", "Connection: close")) as receiver:
        pin = await tls_sender.fingerprint(receiver.url)
        assert (await send(tls_sender, receiver.url, pin)).ok
        before = receiver.bytes_read
        receiver.show(pairs["second"])
        refused = await send(tls_sender, receiver.url, pin)
        assert receiver.bytes_read == before
        # After the new certificate is pinned, delivery succeeds.
        again = await send(tls_sender, receiver.url, await tls_sender.fingerprint(receiver.url))
    new = sha256_of(pairs["second"])
    assert (refused.ok, refused.status, refused.outcome) == (False, None, Outcome.PIN)
    assert refused.reason == f"the certificate changed: {pin} is pinned, {new} was shown; nothing was sent"
    assert again.ok


@pytest.mark.parametrize("shown", ["stranger", "elsewhere"])
async def test_changed_certificate_is_reported_as_changed_even_if_it_is_untrusted(tls_sender, pairs, shown):
    async with Receiver(tls=pairs["first"], answer=status(200, "", b"", "Connection: close")) as receiver:
        pin = await tls_sender.fingerprint(receiver.url)
        receiver.show(pairs[shown])
        refused = await send(tls_sender, receiver.url, pin)
    assert refused.outcome is Outcome.PIN
    assert f"{sha256_of(pairs[shown])} was shown" in refused.reason
    assert refused.reason.endswith("nothing was sent")
    assert receiver.bytes_read == 0


async def test_pin_does_not_replace_verification(tls_sender, pairs):
    async with Receiver(tls=pairs["expired"]) as receiver:
        attempt = await send(tls_sender, receiver.url, sha256_of(pairs["expired"]))
    assert attempt.outcome is Outcome.TLS
    assert "certificate has expired" in attempt.reason
    assert receiver.bytes_read == 0


async def test_connection_made_without_a_pin_is_not_used_with_one(tls_sender, pairs):
    async with Receiver(tls=pairs["first"]) as receiver:
        assert (await send(tls_sender, receiver.url)).ok
        # The first connection is still open, but its certificate is not the pinned one.
        attempt = await send(tls_sender, receiver.url, sha256_of(pairs["second"]))
        assert attempt.outcome is Outcome.PIN
        assert (await send(tls_sender, receiver.url)).ok
    assert len(receiver.requests) == 2


async def test_duration_of_an_attempt_is_measured(make_sender):
    async with Receiver(hang) as receiver:
        begun = time.monotonic()
        attempt = await send(make_sender(timeout_s=0.1), receiver.url)
        passed_ms = (time.monotonic() - begun) * 1000
    assert 90 <= attempt.duration_ms <= passed_ms + 10


async def test_wrong_ca_file_or_network_raises_at_construction(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        Sender(ca_file=str(tmp_path / "none.pem"))
    with pytest.raises(ValueError, match=r"10\.0\.0\.0/33"):
        Sender(allow_addresses=["10.0.0.0/33"])
