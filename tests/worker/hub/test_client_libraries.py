"""When connections came, and with which library."""

from redpoll.worker.hub.client_libraries import ClientLibraries
from redpoll.worker.hub.removed import RemovalCount


def test_connections_of_one_second_and_library_share_one_object():
    now = 100.2
    libraries = ClientLibraries(lambda: now, RemovalCount())
    first = libraries.note({"client": "js", "version": "8.6.0"})
    assert (first.library, first.at_s, first.address) == ("js 8.6.0", 100, "")
    now = 100.9
    assert libraries.note({"client": "js", "version": "8.6.0"}) is first
    now = 101.0
    assert libraries.note({"client": "js", "version": "8.6.0"}).at_s == 101


def test_a_removal_comes_after_the_connections_before_it_whatever_the_clock_says():
    now, removals = 1_700_000_000.0, RemovalCount()
    libraries = ClientLibraries(lambda: now, removals)
    query = {"client": "js"}
    before = libraries.note(query)
    number = removals.next()
    after = libraries.note(query)
    now -= 3600
    much_later = libraries.note(query)
    assert before.removals < number
    assert after.removals == much_later.removals == number
    assert (before.at_s, after.at_s, much_later.at_s) == (1_700_000_000, 1_700_000_000, 1_699_996_400)
    # Behind a proxy each has an object of its own.
    proxied = before._replace(address="192.0.2.7")
    assert (proxied.removals, proxied.at_s, len(proxied)) == (before.removals, before.at_s, 3)


def test_names_are_short_and_printable():
    libraries = ClientLibraries(lambda: 1.0)
    assert libraries.note({}).library == ""
    assert libraries.note({"client": "a\r\nb\x00" + "x" * 500}).library == "ab" + "x" * 35
    assert len(libraries.note({"client": "x" * 99, "version": "y" * 99}).library) <= 81


def test_the_number_of_names_is_bounded():
    libraries = ClientLibraries(lambda: 1.0)
    first = libraries.note({"client": "c0"})
    for at in range(1, 100):
        libraries.note({"client": f"c{at}"})
    assert libraries.note({"client": "c0"}) is first
    libraries.note({"client": "one more"})
    # All are forgotten then, and each connection after that begins a new object.
    assert libraries.note({"client": "c0"}) is not first
