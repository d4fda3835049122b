"""The letters of `App.hooks` are those of the events that control writes into the record."""

from redpoll.cluster.hooks import Hook


def test_each_kind_of_event_has_a_letter_of_its_own():
    letters = [letter for name, letter in vars(Hook).items() if name.isupper()]
    assert sorted(letters) == sorted(set("omcxs"))
