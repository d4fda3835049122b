import hashlib
import hmac
from urllib.parse import quote, quote_plus, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redpoll.protocol.apps import App, Key
from redpoll.protocol.auth import (
    MAX_SKEW_S,
    channel_fault,
    check_pair,
    check_query,
    check_size,
    encryption_secret,
    parse_query,
    sign_channel,
    signin_fault,
    token_hash,
)
from redpoll.protocol.channels import CONSOLE
from redpoll.protocol.errors import ApiError

KEY, SECRET = "278d425bdf160c739803", "7ad3773142a6692b25b8"
NOW = 1353088179
BODY = b'{"name":"foo","channels":["project-3"],"data":"{\\"some\\":\\"data\\"}"}'
POST_QUERY = (
    f"auth_key={KEY}&auth_timestamp={NOW}&auth_version=1.0&body_md5=ec365a775a4cd0599faeb73354201b6f"
    "&auth_signature=da454824c97ba181a32ccc17a72625ba02771f50b50e1e7430e47a1f3f457e6c"
)
GET_QUERY = (
    f"auth_key={KEY}&auth_timestamp={NOW}&auth_version=1.0&filter_by_prefix=presence-&info=user_count"
    "&auth_signature=16819168891cb5dfd72b5c7a5d3d602605b26c6ba1930033b5e2eeeb65010291"
)
USER_10 = '{"user_id":10,"user_info":{"name":"Mr. %s"}}'


def code_of(*arguments, **more) -> str:
    with pytest.raises(ApiError) as refusal:
        check_query(*arguments, **more)
    assert refusal.value.status == 401
    return refusal.value.code


@pytest.fixture
def query(sign):
    """`query(method, path, body, fields)`: a query signed as the libraries do it."""

    def query(method="GET", path="/apps/3/channels", body=b"", signed=None, secret=SECRET, **fields):
        fields = {"auth_key": KEY, "auth_timestamp": str(NOW), "auth_version": "1.0", **fields}
        if body:
            fields.setdefault("body_md5", hashlib.md5(body).hexdigest())
        text = signed or "&".join(f"{name}={fields[name]}" for name in sorted(fields))
        fields["auth_signature"] = sign(f"{method}\n{path}\n{text}", secret)
        return urlencode(fields, quote_via=quote)

    return query


# -- channels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("channel", "channel_data", "digest"),
    [
        ("private-foobar", None, "58df8b0c36d6982b82c3ecf6b4662e34fe8c25bba48f5369f135bf843651c3a4"),
        (
            "presence-foobar",
            USER_10 % "Channels",
            "31935e7d86dba64c2a90aed31fdc61869f9b22ba9d8863bba239c03ca481bc80",
        ),
        (
            "presence-foobar",
            USER_10 % "Pusher",
            "afaed3695da2ffd16931f457e338e6c9f2921fa133ce7dac49f529792be6304c",
        ),
    ],
)
def test_channel_signatures_are_the_protocols_vectors(app, channel, channel_data, digest):
    assert sign_channel(SECRET, "1234.1234", channel, channel_data) == digest
    assert channel_fault(app, "1234.1234", channel, f"{KEY}:{digest}", channel_data) is None


@pytest.mark.parametrize("bytes_long", [0, 1, 20, 63, 64, 65, 200])
@given(text=st.text())
def test_digests_are_hmac_sha256_for_secrets_of_any_length(bytes_long, text):
    for secret in ("x" * bytes_long, "é" * (bytes_long // 2)):
        expected = hmac.new(secret.encode(), f"1.2:c:{text}".encode(), hashlib.sha256).hexdigest()
        assert sign_channel(secret, "1.2", "c", text) == expected


def test_a_private_subscribe_with_channel_data_was_signed_with_it(app, sign):
    auth = f"{KEY}:{sign('1.2:private-x:data')}"
    assert channel_fault(app, "1.2", "private-x", auth, "data") is None
    assert channel_fault(app, "1.2", "private-x", auth, None) is not None


def test_the_console_channel_takes_no_channel_data():
    console = Key(key="c" * 20, secret="d" * 40)
    app = App(id="3", name="t", keys=(), console_key=console)
    signed = f"{console.key}:" + sign_channel(console.secret, "1.2", CONSOLE)
    assert channel_fault(app, "1.2", CONSOLE, signed, None) is None
    forged = f"{console.key}:" + sign_channel(console.secret, f"1.2:{CONSOLE}:x", CONSOLE)
    assert channel_fault(app, "1.2", CONSOLE, forged, f"x:{CONSOLE}") is not None


def test_any_enabled_key_signs_and_a_disabled_one_does_not(sign):
    off = Key(key="off", secret="c", enabled=False)
    app = App(id="1", name="x", keys=(Key(key="old", secret="a"), Key(key="new", secret="b"), off))
    for key, secret in (("old", "a"), ("new", "b")):
        assert channel_fault(app, "1.2", "private-x", f"{key}:{sign('1.2:private-x', secret)}", None) is None
    for key, secret in (("old", "b"), ("new", "a"), ("off", "c"), ("none", "a")):
        assert channel_fault(app, "1.2", "private-x", f"{key}:{sign('1.2:private-x', secret)}", None)


def test_a_refusal_shows_the_string_to_sign_and_the_keys_but_no_digest(app, sign):
    wrong = "0" * 64
    fault = channel_fault(app, "1.2", "presence-x", f"{KEY}:{wrong}", "the data")
    assert fault.startswith(
        f"Invalid signature: Expected HMAC SHA256 hex digest of 1.2:presence-x:the data, but got {wrong}"
    )
    assert f"signed for the key '{KEY}', the app has the keys '{KEY}'" in fault
    assert sign("1.2:presence-x:the data") not in fault
    assert SECRET not in fault


def test_a_refusal_of_an_unknown_key_lists_the_apps_keys(app, sign):
    fault = channel_fault(app, "1.2", "private-x", f"other:{sign('1.2:private-x')}", None)
    assert fault == f"Invalid key in subscription auth data: 'other'; the app has the keys '{KEY}'"


def test_a_refusal_lists_enabled_keys_only(sign):
    app = App(id="1", name="x", keys=(Key(key="old", secret="a", enabled=False), Key(key="new", secret="b")))
    fault = channel_fault(app, "1.2", "private-x", f"old:{sign('1.2:private-x', 'a')}", None)
    assert fault == "Invalid key in subscription auth data: 'old'; the app has the keys 'new'"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda auth: auth.upper(),
        lambda auth: auth[:-1],
        lambda auth: auth + "0",
        lambda auth: auth.replace(":", ""),
        lambda auth: ":" + auth,
        lambda auth: auth.replace(":", "::"),
        lambda auth: auth.partition(":")[2],
        lambda auth: auth.partition(":")[0] + ":",
        lambda auth: auth + " ",
        lambda auth: auth[:-1] + "é",
        lambda auth: auth[:-1] + "\ud800",
        lambda auth: ":",
        lambda auth: "",
    ],
)
def test_auth_must_be_a_key_a_colon_and_a_digest(app, sign, spoil):
    good = f"{KEY}:{sign('1.2:private-x')}"
    assert channel_fault(app, "1.2", "private-x", good, None) is None
    assert channel_fault(app, "1.2", "private-x", spoil(good), None)


# -- sign-ins, encrypted channels, tokens --------------------------------------------------------------------


def test_the_signature_of_a_sign_in_is_the_protocols_vector(app):
    digest = "4708d583dada6a56435fb8bc611c77c359a31eebde13337c16ab43aa6de336ba"
    assert signin_fault(app, "1234.1234", f"{KEY}:{digest}", '{"id":"12345"}') is None
    assert signin_fault(app, "1234.1235", f"{KEY}:{digest}", '{"id":"12345"}') is not None
    assert signin_fault(app, "1234.1234", f"{KEY}:{digest}", '{"id": "12345"}') is not None


def test_channel_signatures_and_sign_in_signatures_are_not_interchangeable(app, sign):
    channel = f"{KEY}:{sign('1.2:private-x:user')}"
    assert signin_fault(app, "1.2", channel, "user") is not None
    signin = f"{KEY}:{sign('1.2::user::private-x')}"
    assert channel_fault(app, "1.2", "private-x", signin, None) is not None


def test_a_refused_sign_in_shows_the_string_to_sign_and_the_keys_but_no_digest(app, sign):
    wrong = signin_fault(app, "1.2", f"{KEY}:{'0' * 64}", '{"id":"7"}')
    assert "hex digest of 1.2::user::{" in wrong
    assert f"signed for the key '{KEY}', the app has the keys '{KEY}'" in wrong
    foreign = signin_fault(app, "1.2", f"other:{sign('x')}", '{"id":"7"}')
    assert foreign == f"Invalid key in signin auth data: 'other'; the app has the keys '{KEY}'"
    for fault in (wrong, foreign, signin_fault(app, "1.2", f"{KEY}:short", '{"id":"7"}')):
        assert sign('1.2::user::{"id":"7"}') not in fault
        assert SECRET not in fault
        assert KEY in fault


def test_a_refusal_of_a_malformed_signature_lists_the_keys_too(app):
    for fault in (
        channel_fault(app, "1.2", "private-x", f"{KEY}:{'A' * 64}", None),
        channel_fault(app, "1.2", "private-x", KEY, None),
    ):
        assert "64 lowercase hex digits" in fault
        assert f"signed for the key '{KEY}', the app has the keys '{KEY}'" in fault


def test_the_secret_of_an_encrypted_channel_is_the_protocols_vector():
    master_key = bytes(range(32))
    secret = encryption_secret(master_key, "private-encrypted-foobar")
    assert secret == "g3Au6SZ+UCU+IMfFsFva0rq+Gi4tzSHR6WCcWZbS9sY="
    assert encryption_secret(master_key, "private-encrypted-foobaz") != secret


def test_the_hash_of_a_token_is_its_sha256():
    assert token_hash("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert len(token_hash("\udc80")) == 64


# -- HTTP ----------------------------------------------------------------------------------------------------


def test_http_signatures_are_the_protocols_vectors(app):
    assert ("body_md5", "ec365a775a4cd0599faeb73354201b6f") in check_query(
        app, "POST", "/apps/3/events", POST_QUERY, BODY, NOW
    )
    params = check_query(app, "GET", "/apps/3/channels", GET_QUERY, b"", NOW)
    assert ("filter_by_prefix", "presence-") in params


def test_one_byte_changed_anywhere_is_refused(app):
    """Every byte of the method, path, query and body counts."""
    path = "/apps/3/events"
    for at in range(len("POST")):
        method = "POST"[:at] + "x" + "POST"[at + 1 :]
        assert code_of(app, method, path, POST_QUERY, BODY, NOW) == "invalid_signature"
    for at in range(len(path)):
        other = path[:at] + "~" + path[at + 1 :]
        assert code_of(app, "POST", other, POST_QUERY, BODY, NOW) == "invalid_signature"
    for at in range(len(POST_QUERY)):
        changed = "1" if POST_QUERY[at] != "1" else "2"
        query = POST_QUERY[:at] + changed + POST_QUERY[at + 1 :]
        assert code_of(app, "POST", path, query, BODY, NOW) in ("unauthorized", "invalid_signature")
    for at in range(len(BODY)):
        body = BODY[:at] + bytes([BODY[at] ^ 1]) + BODY[at + 1 :]
        assert code_of(app, "POST", path, POST_QUERY, body, NOW) == "body_md5_mismatch"


def test_the_order_of_the_parameters_and_the_case_of_their_names_do_not_matter(app):
    fields = POST_QUERY.split("&")
    check_query(app, "POST", "/apps/3/events", "&".join(reversed(fields)), BODY, NOW)
    check_query(app, "POST", "/apps/3/events", POST_QUERY.replace("auth_key", "Auth_KEY"), BODY, NOW)


@pytest.mark.parametrize("way", [-1, 1])
def test_clocks_may_differ_by_ten_minutes(app, way):
    call = (app, "POST", "/apps/3/events", POST_QUERY, BODY)
    for skew_s in (0, 599, MAX_SKEW_S):
        check_query(*call, NOW + way * skew_s)
    assert code_of(*call, NOW + way * (MAX_SKEW_S + 1)) == "timestamp_out_of_range"


@pytest.mark.parametrize(("skew_s", "way"), [(601, "behind"), (-601, "ahead of"), (-3600, "ahead of")])
def test_a_refused_timestamp_is_answered_with_the_difference_and_the_servers_time(app, skew_s, way):
    with pytest.raises(ApiError) as refusal:
        check_query(app, "POST", "/apps/3/events", POST_QUERY, BODY, NOW + skew_s)
    assert refusal.value.code == "timestamp_out_of_range"
    assert f"{abs(skew_s)} s {way} the server's time {NOW + skew_s}" in refusal.value.message


@pytest.mark.parametrize("stamp", ["", "x", "1e9", "-1", f"{NOW}.0", "٣", "9" * 400, f" {NOW}"])
def test_a_timestamp_must_be_whole_seconds(app, query, stamp):
    assert code_of(app, "GET", "/apps/3/channels", query(auth_timestamp=stamp), b"", NOW) == "timestamp_out_of_range"


def test_a_refused_request_shows_the_string_to_sign_but_no_digest(app, sign):
    with pytest.raises(ApiError) as refusal:
        check_query(app, "GET", "/apps/3/x", GET_QUERY, b"", NOW)
    text = f"auth_key={KEY}&auth_timestamp={NOW}&auth_version=1.0&filter_by_prefix=presence-&info=user_count"
    assert f'HmacSHA256Hex("GET\\n/apps/3/x\\n{text}", your_secret_key)' in refusal.value.message
    assert 'you sent "16819168891cb5df' in refusal.value.message
    assert sign(f"GET\n/apps/3/x\n{text}") not in refusal.value.message
    assert SECRET not in refusal.value.message


def test_a_body_needs_its_digest(app, query):
    signed = query("POST", "/apps/3/events", body_md5="")
    assert code_of(app, "POST", "/apps/3/events", signed, b"{}", NOW) == "body_md5_mismatch"
    signed = query("POST", "/apps/3/events")
    assert code_of(app, "POST", "/apps/3/events", signed, b"{}", NOW) == "body_md5_mismatch"


def test_a_body_that_does_not_match_its_digest_is_refused(app):
    with pytest.raises(ApiError, match="does not match the 2 bytes received") as refusal:
        check_query(app, "POST", "/apps/3/events", POST_QUERY, b"{}", NOW)
    assert refusal.value.code == "body_md5_mismatch"
    assert hashlib.md5(b"{}").hexdigest() not in refusal.value.message


def test_the_digest_of_an_empty_body_is_accepted_as_the_python_library_sends_it(app, query):
    empty = "d41d8cd98f00b204e9800998ecf8427e"
    check_query(app, "GET", "/apps/3/channels", query(body_md5=empty), b"", NOW)
    assert code_of(app, "GET", "/apps/3/channels", query(body_md5="0" * 32), b"", NOW) == "body_md5_mismatch"


@pytest.mark.parametrize("name", ["auth_key", "auth_timestamp", "auth_version", "auth_signature"])
def test_every_credential_is_required(app, name):
    rest = "&".join(field for field in POST_QUERY.split("&") if not field.startswith(name))
    with pytest.raises(ApiError, match=name) as refusal:
        check_query(app, "POST", "/apps/3/events", rest, BODY, NOW)
    assert refusal.value.code == "unauthorized"


@pytest.mark.parametrize("name", ["auth_key", "auth_timestamp", "auth_version", "auth_signature", "body_md5"])
@pytest.mark.parametrize("spelled", ["{}[]", "{}[x]", "{}%5Bx%5D", "{}["])
def test_a_credential_with_brackets_can_not_be_added_to_a_signed_request(app, name, spelled):
    """A layout that libraries sign joins `name[…]` to `name`, so `auth_signature[x]` would be left out of the text."""
    query = f"{POST_QUERY}&{spelled.format(name)}=1"
    assert code_of(app, "POST", "/apps/3/events", query, BODY, NOW) == "unauthorized"


def test_a_query_has_at_most_100_parameters():
    check_size("&".join(f"a{number}[]=" for number in range(100)))
    with pytest.raises(ApiError, match="more than 100 parameters") as refusal:
        check_size("&".join(f"a{number}[]=" for number in range(101)))
    assert refusal.value.status == 400


@pytest.mark.parametrize("name", ["auth_key", "auth_timestamp", "auth_version", "auth_signature", "body_md5"])
@pytest.mark.parametrize("spelled", [str, str.upper])
def test_a_credential_given_twice_is_refused(app, name, spelled):
    value = dict(field.split("=") for field in POST_QUERY.split("&"))[name]
    with pytest.raises(ApiError, match=f"{name} is given more than once") as refusal:
        check_query(app, "POST", "/apps/3/events", f"{POST_QUERY}&{spelled(name)}={value}", BODY, NOW)
    assert refusal.value.code == "unauthorized"


def test_another_version_of_the_scheme_is_refused(app, query):
    assert code_of(app, "GET", "/apps/3/channels", query(auth_version="2.0"), b"", NOW) == "unauthorized"


def test_an_unknown_key_and_an_unknown_app_get_the_same_answer(app, query):
    """The answer doesn't reveal which app ids exist."""
    answers = set()
    for asked in (app, None):
        with pytest.raises(ApiError) as refusal:
            check_query(asked, "GET", "/apps/3/channels", query(auth_key="other"), b"", NOW)
        answers.add((refusal.value.code, refusal.value.message))
    assert answers == {("unauthorized", "auth_key 'other' is not an enabled key of this app")}


def test_a_disabled_key_cannot_sign_requests(query):
    app = App(id="3", name="x", keys=(Key(key=KEY, secret=SECRET, enabled=False),))
    assert code_of(app, "GET", "/apps/3/channels", query(), b"", NOW) == "unauthorized"


# -- how other libraries lay it out --------------------------------------------------------------------------


def test_the_prefix_may_be_missing_from_the_signed_path(app, query):
    """PHP signs /apps/… and calls /api/v1/apps/…."""
    signed = query("POST", "/apps/3/events", BODY)
    check_query(app, "POST", "/api/v1/apps/3/events", signed, BODY, NOW)
    check_query(app, "POST", "/other/apps/3/events", signed, BODY, NOW, prefix="/other")
    for path in ("/api/v2/apps/3/events", "/xapi/v1/apps/3/events", "/api/v1apps/3/events"):
        assert code_of(app, "POST", path, signed, BODY, NOW) == "invalid_signature"


def test_a_signed_path_with_the_prefix_is_not_good_without_it(app, query):
    signed = query("POST", "/api/v1/apps/3/events", BODY)
    check_query(app, "POST", "/api/v1/apps/3/events", signed, BODY, NOW)
    assert code_of(app, "POST", "/apps/3/events", signed, BODY, NOW) == "invalid_signature"


@pytest.mark.parametrize("user", ["auth0|1", "ann b", "jürgen", "urn:x{y}", "50% off"])
def test_the_path_may_be_signed_unescaped(app, query, user):
    """Node's and PHP's libraries sign a user's id as it is; their HTTP client escapes it."""
    path = "/apps/3/users/{}/terminate_connections"
    signed = query("POST", path.format(user), b"{}")
    for prefix in ("", "/api/v1"):
        check_query(app, "POST", prefix + path.format(quote(user)), signed, b"{}", NOW)
    with_prefix = query("POST", "/api/v1" + path.format(user), b"{}")
    check_query(app, "POST", "/api/v1" + path.format(quote(user)), with_prefix, b"{}", NOW)
    assert code_of(app, "POST", path.format("other%20b"), signed, b"{}", NOW) == "invalid_signature"


@pytest.mark.parametrize(
    ("signed", "sent"),
    [
        ("users/a/terminate_connections", "users%2Fa/terminate_connections"),
        # The decoded path is another one's usual text.
        ("users/a%20b/terminate_connections", "users/a%2520b/terminate_connections"),
        ("users/a\nb/terminate_connections", "users/a%0Ab/terminate_connections"),
        ("users/\ufffd/terminate_connections", "users/%FF/terminate_connections"),
    ],
)
def test_a_signature_of_one_path_is_not_good_for_another(app, query, signed, sent):
    asked = query("POST", f"/apps/3/{signed}", b"{}")
    assert code_of(app, "POST", f"/apps/3/{sent}", asked, b"{}", NOW) == "invalid_signature"


def test_a_plus_is_a_plus_or_else_a_space(app, query):
    signed = query(filter_by_prefix="a+b").replace("%2B", "+")
    assert ("filter_by_prefix", "a+b") in check_query(app, "GET", "/apps/3/channels", signed, b"", NOW)
    spaced = query(filter_by_prefix="a b").replace("%20", "+")
    assert ("filter_by_prefix", "a b") in check_query(app, "GET", "/apps/3/channels", spaced, b"", NOW)
    both = query(filter_by_prefix="a b").replace("%20", "+").replace("/apps", "/api/v1/apps")
    check_query(app, "GET", "/api/v1/apps/3/channels", both, b"", NOW)


def test_escaped_values_are_signed_unescaped(app, query):
    asked = query(info="a,b=c&d é")
    check_query(app, "GET", "/apps/3/channels", asked, b"", NOW)
    assert code_of(app, "GET", "/apps/3/channels", asked.replace("%26", "%2526"), b"", NOW) == "invalid_signature"


def credentials() -> str:
    return f"auth_key={KEY}&auth_timestamp={NOW}&auth_version=1.0"


@pytest.mark.parametrize(
    ("sent", "signed"),
    [
        ("channels[]=b&channels[]=a", "channels[]=b&channels[]=a"),
        ("channels[]=b&channels[]=a", "channels[]=a&channels[]=b"),
        ("channels[]=b&channels[]=a", "channels=b,a"),
        ("channels%5B%5D=b&channels%5B%5D=a", "channels=b,a"),
        ("channels[0]=b&channels[1]=a", "channels=b,a"),
        ("channels=b,a", "channels=b,a"),
    ],
)
def test_arrays_may_be_signed_raw_or_collapsed(app, sign, sent, signed):
    signature = sign(f"GET\n/apps/3/x\n{credentials()}&{signed}")
    params = check_query(app, "GET", "/apps/3/x", f"{sent}&{credentials()}&auth_signature={signature}", b"", NOW)
    # Whichever was signed, it is read as this.
    assert [value for name, value in params if name.startswith("channels")] == ["b,a"]
    assert ("channels", "b,a") in params


@pytest.mark.parametrize("items", [["user_count", "subscription_count"], ["user_count"]])
def test_phps_arrays_are_one_parameter(app, sign, items):
    signature = sign(f"GET\n/apps/3/channels\n{credentials()}&info={','.join(items)}")
    sent = "&".join(f"info%5B{number}%5D={item}" for number, item in enumerate(items))
    query = f"{credentials()}&{sent}&auth_signature={signature}"
    params = check_query(app, "GET", "/apps/3/channels", query, b"", NOW)
    assert [(name, value) for name, value in params if name.startswith("info")] == [("info", ",".join(items))]


def test_a_query_of_many_parameters_has_the_usual_layout(app, sign):
    many = "&".join(f"p{number:02d}=1" for number in range(30))
    signature = sign(f"GET\n/apps/3/x\n{credentials()}&channels=b,a&{many}")
    sent = f"{credentials()}&{many}&channels[]=b&channels[]=a&auth_signature={signature}"
    with pytest.raises(ApiError):
        check_query(app, "GET", "/apps/3/x", sent, b"", NOW)
    signature = sign(f"GET\n/apps/3/x\n{credentials()}&channels[]=a&channels[]=b&{many}")
    sent = f"{credentials()}&{many}&channels[]=b&channels[]=a&auth_signature={signature}"
    check_query(app, "GET", "/api/v1/apps/3/x", sent, b"", NOW)


@given(fields=st.dictionaries(st.text(min_size=1), st.text(), max_size=5))
def test_any_signed_and_escaped_query_is_verified(fields, app, sign):
    lowered = {name.lower(): value for name, value in fields.items() if not name.lower().startswith("auth_")}
    lowered.pop("body_md5", None)
    all_fields = {"auth_key": KEY, "auth_timestamp": str(NOW), "auth_version": "1.0", **lowered}
    text = "&".join(f"{name}={all_fields[name]}" for name in sorted(all_fields))
    all_fields["auth_signature"] = sign(f"GET\n/apps/3/x\n{text}")
    for escape in (quote, quote_plus):
        query = urlencode(all_fields, quote_via=escape)
        assert dict(check_query(app, "GET", "/apps/3/x", query, b"", NOW)).keys() == all_fields.keys() or "+" in query


@given(query=st.text(st.characters()), path=st.text(st.characters()), body=st.binary(max_size=20))
def test_garbage_is_refused_with_a_text_that_can_be_encoded(query, path, body, app):
    for asked in (query, f"{query}&{POST_QUERY}", f"{POST_QUERY}&{query}"):
        with pytest.raises(ApiError) as refusal:
            check_query(app, "POST", path, asked, body, NOW)
        assert refusal.value.status == 401
        refusal.value.message.encode()


def test_a_query_is_read_in_order_with_repeats_and_lower_case_names():
    assert parse_query("B=1&a=%C3%A9&&a=x=y&c&=v&d=1+2&e=%zz") == [
        ("b", "1"),
        ("a", "é"),
        ("a", "x=y"),
        ("c", ""),
        ("", "v"),
        ("d", "1+2"),
        ("e", "%zz"),
    ]
    assert parse_query("") == []


# -- the header pair -----------------------------------------------------------------------------------------


def test_the_header_pair_is_accepted_by_its_own_app(app):
    check_pair(app, KEY, SECRET)
    with pytest.raises(ApiError):
        check_pair(None, KEY, SECRET)


@pytest.mark.parametrize(
    ("key", "secret"),
    [
        (KEY, "x"),
        (KEY, ""),
        (KEY, SECRET + "0"),
        (KEY, "é"),
        (KEY, "\udc80"),
        ("", ""),
        ("other", SECRET),
        ("x", "0" * 64),
    ],
)
def test_a_wrong_header_pair_is_refused_without_repeating_the_secret(app, key, secret):
    for asked in (app, None):
        with pytest.raises(ApiError) as refusal:
            check_pair(asked, key, secret)
        assert refusal.value.code == "unauthorized"
        assert SECRET not in refusal.value.message


def test_no_app_accepts_the_stand_in_for_a_missing_secret(app, sign):
    for asked in (None, app):
        with pytest.raises(ApiError):
            check_pair(asked, "nobody", "0" * 64)
    query = f"auth_key=nobody&auth_timestamp={NOW}&auth_version=1.0"
    signature = sign(f"GET\n/apps/3/channels\n{query}", "0" * 64)
    assert code_of(None, "GET", "/apps/3/channels", f"{query}&auth_signature={signature}", b"", NOW) == "unauthorized"
    assert channel_fault(app, "1.2", "private-x", f"nobody:{sign('1.2:private-x', '0' * 64)}", None)
