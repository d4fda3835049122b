import pytest

from redpoll.cluster.endpoint import Endpoint


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("redis://h", Endpoint(None, "h", 6379, None, None, 0)),
        ("redis://u:p%40@h:7/3", Endpoint(None, "h", 7, "u", "p@", 3)),
        ("redis://:p@h?db=2", Endpoint(None, "h", 6379, None, "p", 2)),
        ("unix:///a/b.sock", Endpoint("/a/b.sock", "127.0.0.1", 6379, None, None, 0)),
        ("unix:///a?db=4&password=x", Endpoint("/a", "127.0.0.1", 6379, None, "x", 4)),
    ],
)
def test_url_names_socket_credentials_and_database(url, endpoint):
    assert Endpoint.parse(url) == endpoint


@pytest.mark.parametrize("url", ["http://h", "unix://", "redis://h/x"])
def test_bad_url_is_refused(url):
    with pytest.raises(ValueError, match="Redis"):
        Endpoint.parse(url)
