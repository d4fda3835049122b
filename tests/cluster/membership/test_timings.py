from redpoll.cluster.membership.timings import Timings


def test_delays_double_up_to_the_greatest():
    timings = Timings(retry_s=0.5, max_retry_s=3)
    assert [timings.retry_delay_s(failures) for failures in (0, 1, 2, 3, 10_000)] == [0.5, 1, 2, 3, 3]


def test_beats_are_missed_long_before_the_connection_counts_as_broken():
    timings = Timings()
    assert timings.beat_s < timings.away_s < timings.unanswered_s
    # A refused connection is retried more than once before it is turned away.
    assert 2 * timings.admit_retry_s < timings.max_admit_s
