"""Places of an address, and whose connections go first when there is no room. test_crowds.py tests what clients see."""

from redpoll.config.proxies import NO_PROXIES, TrustedProxies
from redpoll.worker.hub.addresses import SHARED_FACTOR
from redpoll.worker.ingress.strangers import Strangers

PROXIES = TrustedProxies(["10.0.0.0/8"])


class Peer:
    """A connection of this address."""

    def __init__(self, address="8.8.8.8"):
        self.address = address
        self.unsent_bytes = 0
        self.aborted = False

    def abort(self):
        assert not self.aborted
        self.aborted = True


def place(strangers, address):
    peer = Peer(address)
    return peer if strangers.reserve(peer, address) else None


def test_a_connection_holds_one_place_whatever_it_does():
    strangers = Strangers(1, PROXIES)
    peer = place(strangers, "8.8.8.8")
    assert strangers.reserve(peer, "8.8.8.8")
    assert place(strangers, "8.8.8.8") is None
    assert place(strangers, "8.8.4.4")
    assert len(strangers) == 2
    for _ in range(2):
        strangers.release(peer)
    assert place(strangers, "8.8.8.8")
    assert place(strangers, "8.8.8.8") is None


def test_an_ipv6_network_of_64_bits_is_one_address():
    strangers = Strangers(1, PROXIES)
    assert place(strangers, "2600::1:2:3:4:5")
    assert place(strangers, "2600:0:0:1::9") is None
    assert place(strangers, "2600:0:0:2::9")


def test_a_trusted_proxy_has_no_limit_and_an_unknown_one_a_larger():
    assert all(place(Strangers(1, PROXIES), "10.1.2.3") for _ in range(20))
    for address, trusted, limit in (("10.1.2.3", NO_PROXIES, SHARED_FACTOR), ("192.168.1.1", PROXIES, 1)):
        strangers = Strangers(1, trusted)
        assert [bool(place(strangers, address)) for _ in range(limit + 1)] == [True] * limit + [False]
    unlimited = Strangers(0, NO_PROXIES)
    assert all(place(unlimited, "8.8.8.8") for _ in range(20))
    assert len(unlimited) == 0


def test_a_place_is_held_until_the_answer_is_read():
    strangers = Strangers(1, PROXIES)
    peer = place(strangers, "8.8.8.8")
    peer.unsent_bytes = 100_000
    strangers.rest(peer)
    strangers.beat()
    assert len(strangers) == 1
    peer.unsent_bytes = 0
    # Its next request came first.
    assert strangers.reserve(peer, "8.8.8.8")
    strangers.beat()
    assert len(strangers) == 1
    strangers.rest(peer)
    assert len(strangers) == 0


def crowd(**queues):
    strangers = Strangers(0, PROXIES)
    peers = {}
    for name, addresses in queues.items():
        peers[name] = [Peer(address) for address in addresses]
        getattr(strangers, name).update(dict.fromkeys(peers[name]))
    return strangers, peers


def aborted(peers):
    return [peer.aborted for peer in peers]


def test_those_that_nobody_would_miss_go_first():
    strangers, peers = crowd(closing=["1"], newcomers=["2"], idle=["3"], callers=["4", "4"])
    for name in ("closing", "newcomers", "idle", "callers"):
        assert not peers[name][0].aborted
        assert strangers.make_room("new")
        assert peers[name][0].aborted
    assert not strangers.make_room("new")
    assert len(strangers.leaving) == 4


def test_an_answer_that_is_not_written_yet_is_not_cut():
    strangers, peers = crowd(closing=["1", "2"])
    peers["closing"][0].unsent_bytes = 1
    assert strangers.make_room("new")
    assert aborted(peers["closing"]) == [False, True]


def test_a_flood_ends_its_own_connections_and_not_older_ones_of_others():
    strangers, peers = crowd(newcomers=["good", "flood", "good too", *["flood"] * 40])
    for _ in range(6):
        assert strangers.make_room("new")
    assert not peers["newcomers"][0].aborted
    assert not peers["newcomers"][2].aborted
    assert len(strangers.leaving) >= 20


def test_of_different_addresses_the_oldest_goes():
    strangers, peers = crowd(newcomers=["a", "b", "c"])
    assert strangers.make_room("new")
    assert aborted(peers["newcomers"]) == [True, False, False]


def test_addresses_from_which_somebody_authenticated_make_room_for_each_other_only():
    strangers, peers = crowd(newcomers=["back end", "back end", "stranger"])
    strangers.authenticated(Peer(), "back end")
    assert strangers.make_room("stranger")
    assert aborted(peers["newcomers"]) == [False, False, True]
    assert not strangers.make_room("stranger")
    assert strangers.make_room("back end")
    assert aborted(peers["newcomers"]) == [True, False, True]
    # Others authenticate, until this address isn't remembered any more.
    for n in range(1023):
        strangers.authenticated(Peer(), str(n))
    assert not strangers.make_room("stranger")
    strangers.authenticated(Peer(), "one more")
    assert strangers.make_room("stranger")
    assert aborted(peers["newcomers"]) == [True, True, True]


def test_those_that_may_not_go_hide_no_others():
    strangers, peers = crowd(closing=["a"] * 17)
    for peer in peers["closing"][:16]:
        peer.unsent_bytes = 1
    assert strangers.make_room("new")
    assert aborted(peers["closing"]) == [False] * 16 + [True]
    assert not strangers.make_room("new")
    for queue in ("newcomers", "callers"):
        strangers, peers = crowd(**{queue: ["back end"] * 16 + ["flood"] * 3})
        strangers.authenticated(Peer(), "back end")
        assert strangers.make_room("new")
        assert aborted(peers[queue]) == [False] * 16 + [True, True, False]
    strangers, peers = crowd(callers=[*map(str, range(16)), "a", "a"])
    assert strangers.make_room("new")
    assert aborted(peers["callers"]) == [False] * 16 + [True, False]


def test_however_many_may_not_go_the_others_are_found_after_some_calls():
    strangers, peers = crowd(newcomers=["back end"] * 1000 + ["flood"])
    strangers.authenticated(Peer(), "back end")
    assert not strangers.make_room("new")
    assert any(strangers.make_room("new") for _ in range(20))
    assert aborted(peers["newcomers"]) == [False] * 1000 + [True]


def test_a_busy_caller_gives_way_only_if_its_address_has_several_and_to_another_address():
    strangers, peers = crowd(callers=["alone", "a", "a"])
    assert not strangers.make_room("a")
    assert strangers.make_room("b")
    assert aborted(peers["callers"]) == [False, True, False]
    assert not strangers.make_room("b")
