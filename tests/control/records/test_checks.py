"""Limits and rules for records, and the errors for records that break them."""

import pytest

from redpoll.control.records.checks import RecordError, check_name, check_roster, check_rules, check_size
from redpoll.protocol.apps import MAX_HISTORY_RULES, App, HistoryRule

APP = App(id="7", name="x", keys=())


def rules(count: int) -> list[HistoryRule]:
    return [HistoryRule(id=f"{number:06x}", name=f"c{number}", keep=1, seconds=1) for number in range(count)]


@pytest.mark.parametrize("name", ["", " ", "a\nb", "x" * 201, "a\x1bb"])
def test_name_must_be_one_printable_line(name):
    check_name("an app's", "Büro “7”")
    with pytest.raises(RecordError, match="an app's name must have 1 to 200 printable characters"):
        check_name("an app's", name)


def test_record_must_fit_into_the_directory():
    check_size(APP)
    with pytest.raises(RecordError, match="the maximum is 16384"):
        check_size(App(id="7", name="x" * 17_000, keys=()))


def test_member_list_must_fit_into_the_send_buffer_of_a_connection():
    app = App(id="7", name="x", keys=(), max_presence_members=50)
    check_roster(app, None, 50 * (1_024 + 128))
    for before in (None, APP):
        with pytest.raises(RecordError, match="50 members of 1152 bytes"):
            check_roster(app, before, 50 * (1_024 + 128) - 1)


def test_member_list_that_is_not_changed_and_the_default_one_are_taken():
    """`max_unsent_bytes` was set when the app had them."""
    app = App(id="7", name="x", keys=(), max_presence_members=50)
    check_roster(app, app, 1)
    check_roster(APP, None, 1)


def test_number_of_history_rules_is_limited():
    check_rules("7", rules(MAX_HISTORY_RULES))
    with pytest.raises(RecordError, match=f"at most {MAX_HISTORY_RULES} history rules"):
        check_rules("7", rules(MAX_HISTORY_RULES + 1))


def test_contradictory_rule_is_refused_with_its_reason():
    with pytest.raises(RecordError, match="replay must be between 0 and 1 messages, not 5"):
        check_rules("7", [HistoryRule(id="00000a", name="c", keep=1, seconds=1, replay=5)])


def test_two_rules_for_the_same_channels_are_refused():
    one = HistoryRule(id="00000a", name="news", keep=1, seconds=1)
    check_rules("7", [one, HistoryRule(id="00000b", name="news", prefix=True, keep=2, seconds=1)])
    with pytest.raises(RecordError, match=r"the rule 00000a for the channel 'news'; .* rule remove 7 00000a"):
        check_rules("7", [one, HistoryRule(id="00000b", name="news")])
