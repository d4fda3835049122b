from redpoll.doctor.report import Verdict, as_json, as_text, failed, ok, skipped, worst


def test_a_failure_shows_its_cause_and_remedy_below_it():
    text = as_text(failed("TCP", "refused", "nothing listens", "start it", "open the port"))
    assert text.splitlines() == [
        "FAIL  TCP          refused",
        "      likely cause: nothing listens",
        "      start it",
        "      open the port",
    ]


def test_json_has_every_field():
    assert as_json(ok("DNS", "found")) == {"check": "DNS", "verdict": "ok", "seen": "found", "cause": "", "remedy": []}


def test_a_skipped_check_does_not_count():
    assert worst([ok("a", ""), skipped("b", "")]) is Verdict.OK
    assert worst([ok("a", ""), failed("b", "", "")]) is Verdict.FAILED
    assert worst([]) is Verdict.OK


def test_texts_of_the_checked_server_cant_control_the_terminal():
    text = as_text(failed("Connect", "4001: bad \x1b]0;pwned\x07\x9b31m", "\u202ecause", "\x1b[2J"))
    assert text.splitlines() == [
        r"FAIL  Connect      4001: bad \x1b]0;pwned\x07\x9b31m",
        r"      likely cause: \u202ecause",
        r"      \x1b[2J",
    ]
