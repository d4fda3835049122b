"""Signatures compared with the published vectors, and with what redpoll accepts."""

import json
import subprocess
import sys
from urllib.parse import parse_qsl

import pytest

from redpoll_client import sign_channel, sign_user
from redpoll_client.signatures import from_json, hex_hmac, sign_request

KEY, SECRET = "278d425bdf160c739803", "7ad3773142a6692b25b8"


def test_vectors():
    """protocol/README.md "Authentication of channels" and "Request signing"."""
    private = "58df8b0c36d6982b82c3ecf6b4662e34fe8c25bba48f5369f135bf843651c3a4"
    assert sign_channel(KEY, SECRET, "1234.1234", "private-foobar") == {"auth": f"{KEY}:{private}"}
    member = '{"user_id":10,"user_info":{"name":"Mr. Channels"}}'
    presence = "31935e7d86dba64c2a90aed31fdc61869f9b22ba9d8863bba239c03ca481bc80"
    signed = sign_channel(KEY, SECRET, "1234.1234", "presence-foobar", json.loads(member))
    assert signed == {"auth": f"{KEY}:{presence}", "channel_data": member}
    user = "4708d583dada6a56435fb8bc611c77c359a31eebde13337c16ab43aa6de336ba"
    assert sign_user(KEY, SECRET, "1234.1234", {"id": "12345"})["auth"] == f"{KEY}:{user}"
    shared = sign_channel(KEY, SECRET, "1.2", "private-encrypted-foobar", master_key=bytes(range(32)))
    assert shared["shared_secret"] == "g3Au6SZ+UCU+IMfFsFva0rq+Gi4tzSHR6WCcWZbS9sY="
    body = b'{"name":"foo","channels":["project-3"],"data":"{\\"some\\":\\"data\\"}"}'
    query = sign_request(KEY, SECRET, "POST", "/apps/3/events", {}, body, 1353088179)
    assert (
        dict(parse_qsl(query))["auth_signature"] == "da454824c97ba181a32ccc17a72625ba02771f50b50e1e7430e47a1f3f457e6c"
    )
    params = {"filter_by_prefix": "presence-", "info": "user_count"}
    query = sign_request(KEY, SECRET, "GET", "/apps/3/channels", params, b"", 1353088179)
    assert (
        dict(parse_qsl(query))["auth_signature"] == "16819168891cb5dfd72b5c7a5d3d602605b26c6ba1930033b5e2eeeb65010291"
    )
    assert "body_md5" not in query


def test_what_a_server_would_refuse_is_not_signed():
    with pytest.raises(ValueError, match="socket_id"):
        sign_channel(KEY, SECRET, "1.2:private-b", "private-a")
    with pytest.raises(ValueError, match="channel name"):
        sign_channel(KEY, SECRET, "1.2", "private-a:x")
    with pytest.raises(ValueError, match="presence channel"):
        sign_channel(KEY, SECRET, "1.2", "presence-a")
    with pytest.raises(ValueError, match="encrypted"):
        sign_channel(KEY, SECRET, "1.2", "private-encrypted-a")
    for member in ({}, {"user_id": True}, {"user_id": ""}, {"user_id": "x" * 129}, {"user_id": None}):
        with pytest.raises(ValueError, match="user_id"):
            sign_channel(KEY, SECRET, "1.2", "presence-a", member)
    with pytest.raises(ValueError, match="user's id"):
        sign_user(KEY, SECRET, "1.2", {"id": 7})


def test_the_package_imports_nothing_of_redpoll_and_no_framework():
    program = (
        "import redpoll_client, sys; "
        "print([name for name in sys.modules if name.partition('.')[0] in "
        "('redpoll', 'django', 'starlette', 'fastapi', 'flask', 'celery', 'nacl')])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_hmac_is_lowercase_hex():
    assert hex_hmac("key", b"The quick brown fox jumps over the lazy dog") == (
        "f7bc83f430538424b13298e6aa6fb143ef4d59a14946175997479dbc2d1a3cd8"
    )


@pytest.mark.parametrize("text", ['{"a":[1,"é"]}', " 1 ", '"x"\n', "1.5e3", "null"])
def test_texts_are_parsed_as_by_json(text):
    assert from_json(text) == json.loads(text)


@pytest.mark.parametrize("text", ["", " ", "{", "1 2", "[1]x", "\ufeff1", "nul"])
def test_texts_that_json_refuses(text):
    with pytest.raises(ValueError, match=r"line 1|BOM"):
        from_json(text)
