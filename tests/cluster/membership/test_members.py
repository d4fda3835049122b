"""The users of a presence channel on one worker."""

from redpoll.cluster.membership.join import Join
from redpoll.cluster.membership.members import MAX_GONE, Members
from redpoll.protocol.apps import App

APP = App(id="7", name="test", keys=())


def join(user: str) -> Join:
    return Join(None, APP, "presence-room", user)


def test_a_user_is_gone_with_the_last_socket_and_has_the_newest_info():
    members = Members()
    members.attach("u", b"1")
    members.attach("u", b"")
    assert members.infos == {"u": b"1"}
    members.attach("u", b"2")
    for _ in range(3):
        assert members.next_gone([], None) == ([], False)
        members.detach("u")
    assert (members.sockets, members.infos, members.next_gone([], None)) == ({}, {}, (["u"], False))


def test_users_who_join_again_are_not_removed():
    members = Members()
    members.mark_gone(["back", "joining", "queued", "left"])
    members.attach("back", b"")
    gone = members.next_gone([join("joining")], {join("queued"): None})
    # While the queued one may still be refused, the count must stay above 0.
    assert gone == (["left"], True)
    assert list(members.gone) == ["joining", "queued", "left"]


def test_a_call_removes_so_many_users_and_the_next_one_the_others():
    members = Members()
    members.mark_gone([f"{n}" for n in range(MAX_GONE + 1)])
    gone, remain = members.next_gone([], None)
    assert (len(gone), remain) == (MAX_GONE, True)
    for user in gone:
        del members.gone[user]
    assert members.next_gone([], None) == ([f"{MAX_GONE}"], False)


def test_a_reassertion_passes_each_user_once_without_those_who_left_meanwhile():
    members = Members()
    for n in range(300):
        members.attach(f"{n}", b"")
    first = members.next_asserted()
    members.detach("299")
    second = members.next_asserted()
    assert [user for user, _ in [*first, *second]] == [f"{n}" for n in range(299)]
    assert not members.unasserted
