from redpoll.testing.expectations import Expectations
from redpoll.testing.recorder import Published


def test_the_url_of_a_secret_with_odd_characters_is_readable():
    server = Expectations()
    server.host, server.port, server.app_id, server.app_key = "127.0.0.1", 6001, "1", "k"
    server.app_secret = "a/b@c%"
    assert server.pusher_url == "http://k:a%2Fb%40c%25@127.0.0.1:6001/apps/1"


def test_the_event_that_is_returned_is_the_last_one_waited_for():
    server = Expectations()
    for number in range(3):
        server._recorder.add(Published("e", "c", str(number)))
    assert server.wait("e", count=2).data == "1"
    assert server.assert_published("e").data == "2"
    server.assert_not_published("e", data=7)
