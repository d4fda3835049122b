"""When connections came, and with which library."""

from redpoll.worker.hub import client_libraries as module
from redpoll.worker.hub.client_libraries import ClientLibraries


def test_connections_of_one_second_and_library_share_one_object():
    now = 100.2
    arrivals = ClientLibraries(lambda: now)
    first = arrivals.note({"client": "js", "version": "8.6.0"})
    assert first == ("js 8.6.0", 100, "")
    now = 100.9
    assert arrivals.note({"client": "js", "version": "8.6.0"}) is first
    now = 101.0
    assert arrivals.note({"client": "js", "version": "8.6.0"}).at_s == 101


def test_names_are_short_and_printable():
    arrivals = ClientLibraries(lambda: 1.0)
    assert arrivals.note({}).library == ""
    assert arrivals.note({"client": "a\r\nb\x00" + "x" * 500}).library == "ab" + "x" * 35
    assert len(arrivals.note({"client": "x" * 99, "version": "y" * 99}).library) <= 81


def test_the_number_of_names_is_bounded():
    arrivals = ClientLibraries(lambda: 1.0)
    for at in range(1_000):
        arrivals.note({"client": f"c{at}"})
    assert len(arrivals._last) <= module._MAX_LIBRARIES
