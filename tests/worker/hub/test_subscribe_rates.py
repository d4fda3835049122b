"""The limit of subscribes by client address."""

from redpoll.worker.hub.subscribe_rates import BURST_S, SubscribeRates


def test_an_address_has_a_burst_and_then_its_rate():
    rates = SubscribeRates(10)
    taken = [rates.take(7, 100.0) for _ in range(int(10 * BURST_S) + 3)]
    assert taken.count(True) == 10 * BURST_S + 1
    assert rates.refused == 2
    assert rates.take(8, 100.0)
    assert not rates.take(7, 100.05)
    assert rates.take(7, 100.11)
    assert not rates.take(7, 100.11)


def test_the_whole_burst_returns_while_an_address_is_silent():
    rates = SubscribeRates(10)
    while rates.take(7, 100.0):
        pass
    assert sum(rates.take(7, 1000.0) for _ in range(2000)) == 10 * BURST_S + 1


def test_others_that_were_refused_count_as_far_as_the_limit_allows():
    rates = SubscribeRates(10)
    rates.charge(7, 1, 100.0)
    assert rates.take(7, 100.0)
    rates.charge(7, 100, 100.0)
    assert sum(rates.take(7, 100.0) for _ in range(1000)) == 10 * BURST_S - 100
    # The client's neighbours needn't wait for what was beyond it.
    rates.charge(7, 100_000, 100.0)
    assert rates.take(7, 100.11)
    rates.per_s = 0
    rates.charge(7, 100, 100.0)


def test_without_a_rate_nothing_is_counted():
    rates = SubscribeRates()
    assert all(rates.take(7, 100.0) for _ in range(100_000))
    assert rates.refused == 0
    rates.per_s = 10
    assert rates.take(7, 100.0)
