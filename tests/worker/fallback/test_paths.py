import pytest

from redpoll.worker.fallback.paths import Action, read_target


def test_addresses_of_pusher_js_are_read():
    target = read_target(
        b"/pusher/app/278d425bdf160c739803/437/0a1b2c3d/xhr_streaming?protocol=7&client=js&version=8.4.0&t=1764000000000&n=12"
    )
    assert target.path == "/pusher/app/278d425bdf160c739803"
    assert target.key == "278d425bdf160c739803"
    assert target.session == "437/0a1b2c3d"
    assert target.action is Action.STREAM
    assert target.query.startswith("protocol=7&client=js")
    assert target.number == 12


@pytest.mark.parametrize("prefix", ["", "/pusher", "/a/b/c"])
def test_any_prefix_is_allowed(prefix):
    target = read_target(f"{prefix}/app/my%2Dkey/0/abcdefgh/xhr_send?t=1&n=2".encode())
    assert (target.path, target.key, target.action, target.number) == (
        f"{prefix}/app/my%2Dkey",
        "my-key",
        Action.SEND,
        2,
    )


def test_key_may_be_as_long_as_keys_are():
    assert read_target(b"/app/" + b"k" * 128 + b"/0/abcdefgh/xhr").key == "k" * 128


def test_number_may_be_missing_and_is_bounded():
    assert read_target(b"/app/k/0/abcdefgh/xhr").number is None
    assert read_target(b"/app/k/0/abcdefgh/xhr?n=").number is None
    assert read_target(b"/app/k/0/abcdefgh/xhr?xn=7").number is None
    assert read_target(b"/app/k/0/abcdefgh/xhr?n=" + b"9" * 16).number is None
    assert read_target(b"/app/k/0/abcdefgh/xhr?n=-1").number is None


@pytest.mark.parametrize(
    "target",
    [
        b"/app/k",
        b"/app/k/0/abcdefg/xhr",
        b"/app/k/0/" + b"a" * 65 + b"/xhr",
        b"/app/k/12345/abcdefgh/xhr",
        b"/app/k/x/abcdefgh/xhr",
        b"/app/k/0/abcd%20efgh/xhr",
        b"/app/k/0/abcdefgh/websocket",
        b"/app/k/0/abcdefgh/xhr/",
        b"/app/" + b"k" * 129 + b"/0/abcdefgh/xhr",
        b"/" + b"p" * 300 + b"/app/k/0/abcdefgh/xhr",
        b"/x?/app/k/0/abcdefgh/xhr",
        b"x/app/k/0/abcdefgh/xhr",
    ],
)
def test_others_are_not(target):
    assert read_target(target) is None
