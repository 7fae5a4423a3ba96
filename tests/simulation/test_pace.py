from __future__ import annotations

import pytest
from tests.simulation.tasks import er8

import matcha
from matcha.errors import InputError
from matcha.rounds import Round
from matcha.simulation.pace import Agenda, LinkClock, compute_times, link_seconds
from matcha.training.settings import Delays

SLOW = (1.0,) * 7 + (0.25,)


def play(agenda, until):
    found = []
    while agenda.next_time <= until:
        found.append(agenda.next())
    return found


@pytest.mark.parametrize("seconds", [0.0, 0.3, 5.0])
def test_a_worker_holds_one_meeting_at_a_time_and_steps_at_its_own_speed(seconds):
    plan = er8("greedy", 0.5)
    agenda = Agenda(plan, compute_times(Delays(speeds=SLOW), 1.0, 8), lambda link: seconds)
    happened = play(agenda, 100.0)
    assert agenda.iterations == [100] * 7 + [25]
    times = [h.time for h in happened]
    assert times == sorted(times)
    begun = {}
    for h in happened:
        if h.what == "begin":
            assert not {w for link in begun for w in link} & set(h.workers)
            assert h.workers in plan.topology.links
            begun[h.workers] = h.time
        elif h.what == "end":
            assert h.time - begun.pop(h.workers) == pytest.approx(seconds)
    assert sum(h.what == "end" for h in happened) > 20


def test_all_links_are_met_also_where_meetings_take_longer_than_steps():
    """And not always the same two, who have just become free together."""
    plan = er8("matcha", 0.5, "pairwise")
    agenda = Agenda(plan, [0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 5.0], lambda link: 3.0)
    met = {h.workers for h in play(agenda, 400.0) if h.what == "end"}
    assert met == {link for k in range(40) for link in plan.round(k).links}


def test_who_is_slow_meets_less_often_but_meets():
    plan = er8("greedy", 1.0)
    counts = []
    for speeds in ((), SLOW):
        agenda = Agenda(plan, compute_times(Delays(speeds=speeds), 1.0, 8), lambda link: 0.01)
        ends = [h for h in play(agenda, 200.0) if h.what == "end"]
        counts.append([sum(worker in h.workers for h in ends) for worker in range(8)])
    even, uneven = counts
    assert 0.15 * even[7] < uneven[7] < 0.4 * even[7]


def test_it_is_the_same_every_time_and_goes_on_from_its_state():
    plan = er8("greedy", 0.5)
    compute = [1.0, 0.7, 1.3, 1.0, 2.0, 0.9, 1.1, 4.0]
    agendas = [Agenda(plan, compute, lambda link: 0.3) for _ in range(2)]
    first, second = (play(agenda, 30.0) for agenda in agendas)
    assert first == second
    resumed = Agenda(plan, compute, lambda link: 0.3)
    resumed.load(agendas[0].state())
    assert play(resumed, 60.0) == play(agendas[1], 60.0)


def test_links_have_their_own_seconds():
    topology = matcha.families.ring(4).with_link_times([0.1, 0.2, 0.3, 0.4])
    plan = matcha.plan(topology, 1.0, "vanilla")
    found = [link_seconds(plan, Delays())(link) for link in topology.links]
    assert found == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert link_seconds(er8(), Delays(link_time=0.5))((0, 1)) == 0.5


def test_in_step_a_slow_worker_holds_up_those_who_wait_for_it():
    plan = er8("greedy", 0.5)
    clock = LinkClock([1.0] * 7 + [4.0], lambda link: 0.0, beside=False)
    for k in range(100):
        clock.iterate(plan.round(k))
    assert clock.times[7] == 400.0
    assert min(clock.times) > 350.0


def test_beside_the_gradient_an_exchange_costs_only_what_is_longer():
    pair = Round(matchings=(((0, 1),),), indices=(0,), mixing="pairwise", weight=0.5)
    for seconds, expected in ((0.5, [1.0, 1.0]), (3.0, [3.0, 3.0])):
        clock = LinkClock([1.0, 1.0], lambda link, s=seconds: s, beside=True)
        clock.iterate(pair)
        assert clock.times == expected


def test_an_average_waits_for_everybody():
    everybody = Round(matchings=(((0, 1), (1, 2)),), indices=(0,), mixing="average", weight=0.5)
    clock = LinkClock([1.0, 4.0, 2.0], lambda link: 9.0, beside=False)
    clock.iterate(everybody, average=0.5)
    assert clock.times == [4.5] * 3


def test_every_worker_has_a_speed_above_nothing():
    with pytest.raises(InputError, match="2 speeds for 3 workers"):
        compute_times(Delays(speeds=(1.0, 2.0)), 1.0, 3)
    with pytest.raises(InputError, match="speeds must be above 0"):
        Delays(speeds=(1.0, 0.0))
