"""Reading of header fields. test_http_connection.py tests what clients see."""

import pytest

from redpoll.http import head as http_head
from redpoll.http.head import MAX_HEADERS, FieldTable, Head, HeadFault, read_head, size_of_head
from redpoll.http.messages import FIELDS

HOST = (b"Host", b"h")
TABLE = FieldTable(FIELDS)


def test_fields_for_control_are_kept_by_their_place_and_others_dropped():
    head = read_head(
        "1.1", [HOST, (b"ORIGIN", b"o"), (b"X-Other", b"x"), (b"Content-Type", b"application/json")], TABLE
    )
    assert head == Head([(FIELDS.index("Origin"), b"o")], [], 0, False, False)


@pytest.mark.parametrize(
    ("headers", "announced", "expects", "websocket"),
    [
        ([(b"Content-Length", b"7")], 7, False, False),
        ([(b"Transfer-Encoding", b"Chunked")], None, False, False),
        ([(b"Expect", b"100-Continue")], 0, True, False),
        ([(b"Upgrade", b"h2c, WebSocket")], 0, False, True),
        ([(b"Upgrade", b"websocket"), (b"Upgrade", b"h2c")], 0, False, True),
    ],
)
def test_what_a_head_says_about_its_request(headers, announced, expects, websocket):
    assert read_head("1.1", [HOST, *headers], TABLE)[2:] == (announced, expects, websocket)


@pytest.mark.parametrize(
    ("version", "headers", "status"),
    [
        ("1.1", [], 400),
        ("1.1", [HOST, HOST], 400),
        ("1.0", [HOST, HOST], 400),
        ("1.0", [HOST, (b"Transfer-Encoding", b"chunked")], 400),
        ("2.0", [HOST], 400),
        ("1.1", [HOST, (b"Transfer-Encoding", b"gzip, chunked")], 400),
        ("1.1", [HOST, (b"Content-Length", b"0" * 5_000 + b"5")], 400),
        ("1.1", [HOST, (b"Expect", b"200-ok")], 417),
        ("1.1", [HOST] + [(b"X", b"")] * MAX_HEADERS, 431),
    ],
)
def test_a_head_is_refused(version, headers, status):
    with pytest.raises(HeadFault) as refused:
        read_head(version, headers, TABLE)
    assert refused.value.status == status


def test_spellings_that_clients_choose_are_remembered_up_to_a_bound():
    table = FieldTable(FIELDS)
    for n in range(2 * http_head._MAX_SPELLINGS):
        read_head("1.1", [HOST, (b"X-%d" % n, b"")], table)
    assert len(table.spellings) == http_head._MAX_SPELLINGS


def test_a_table_may_have_the_host_among_its_fields():
    table = FieldTable((*FIELDS, "Host", "Cookie"))
    headers = [(b"hOsT", b"h"), (b"COOKIE", b"a=b")]
    head = read_head("1.1", headers, table)
    assert [(table.names[place], value) for place, value in head.fields] == [("Host", b"h"), ("Cookie", b"a=b")]
    with pytest.raises(HeadFault):
        read_head("1.1", [HOST, *headers], table)


def test_the_size_of_a_head_counts_names_and_values():
    assert size_of_head(b"/abc", [(b"Name", b"value")] * 2) == 4 + 2 * 13
