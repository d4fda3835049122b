"""What the supervisor knows of its control plane's fitness to lead."""

from redpoll.cluster.nodes import Fitness
from redpoll.host.fitness import ControlFitness


def test_control_is_unfit_until_it_reports_and_after_three_silent_seconds():
    now = [100.0]
    fitness = ControlFitness(lambda: now[0])
    assert fitness.present() is Fitness.UNFIT
    assert fitness.changes(Fitness.FIT)
    assert not fitness.changes(Fitness.FIT)
    now[0] += 2.9
    assert fitness.present() is Fitness.FIT
    assert fitness.changes(Fitness.WITHOUT_STORE)
    assert fitness.present() is Fitness.WITHOUT_STORE
    now[0] += 3.1
    assert fitness.present() is Fitness.UNFIT
    # The same again is news.
    assert fitness.changes(Fitness.WITHOUT_STORE)
