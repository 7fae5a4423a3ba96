from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import matcha
from matcha.errors import InputError, PlanError
from matcha.schedules import Bernoulli, Choice, Cycle, EvenlySpaced, Schedule, register_schedule
from matcha.strategies import Greedy

P = (0.1, 0.25, 0.5, 0.75, 0.9)
GOLDEN_BERNOULLI = [
    (0, 1, 3, 4),
    (2, 3, 4),
    (2, 3, 4),
    (1, 2, 3, 4),
    (3, 4),
    (2, 3, 4),
    (3, 4),
    (3, 4),
]
GOLDEN_FAR = (2, 3)
GOLDEN_CHOICE = [(2,), (0,), (0,), (1,), (0,), (1,), (2,), (1,)]


def test_golden_rounds_never_change():
    # Fixed for ever: workers on other machines and versions must draw the same rounds.
    coins = Bernoulli(probabilities=P, seed=2019)
    assert [coins.active(k) for k in range(8)] == GOLDEN_BERNOULLI
    assert coins.active(10**15) == GOLDEN_FAR
    one = Choice(probabilities=(0.2, 0.3, 0.4), seed=7)
    assert [one.active(k) for k in range(8)] == GOLDEN_CHOICE


@given(
    seed=st.integers(0, 2**64),
    start=st.integers(0, 10**12),
    p=st.lists(st.floats(0, 1), min_size=1, max_size=9),
)
def test_random_access_equals_the_iterator(seed, start, p):
    for schedule in (
        Bernoulli(probabilities=tuple(p), seed=seed),
        Choice(probabilities=tuple(np.array(p) / max(sum(p), 1)), seed=seed),
    ):
        in_order = list(itertools.islice(schedule.actives(start, None), 5))
        assert in_order == [schedule.active(start + k) for k in range(5)]
        assert list(schedule.actives(start, start + 3)) == in_order[:3]


def test_blocks_join_without_a_seam():
    coins = Bernoulli(probabilities=P, seed=1)
    rounds = list(coins.actives(4090, 4110))
    assert rounds == [coins.active(k) for k in range(4090, 4110)]


def test_frequencies_match_probabilities():
    n = 20_000
    coins = Bernoulli(probabilities=P, seed=11)
    counts = np.zeros(len(P))
    for active in coins.actives(0, n):
        counts[list(active)] += 1
    errors = np.sqrt(np.array(P) * (1 - np.array(P)) / n)
    assert (abs(counts / n - P) < 4 * errors).all()


def test_coins_are_independent_of_each_other_and_of_time():
    n = 20_000
    on = np.zeros((n, 2))
    for k, active in enumerate(Bernoulli(probabilities=(0.5, 0.5), seed=3).actives(0, n)):
        on[k, list(active)] = 1
    centred = on - on.mean(axis=0)
    for a, b in ((centred[:, 0], centred[:, 1]), (centred[1:, 0], centred[:-1, 0])):
        assert abs((a * b).mean()) < 4 * 0.25 / np.sqrt(n)


def test_groups_share_a_coin():
    coins = Bernoulli(probabilities=(0.5, 0.5, 0.2), seed=0, groups=((0, 1), (2,)))
    seen = set(coins.actives(0, 500))
    assert seen <= {(), (0, 1), (2,), (0, 1, 2)}
    assert (0, 1) in seen


def test_choice_draws_at_most_one():
    n = 20_000
    p = (0.2, 0.0, 0.5)
    counts = np.zeros(4)
    for active in Choice(probabilities=p, seed=5).actives(0, n):
        counts[active[0] if active else 3] += 1
    expected = np.array([0.2, 0.0, 0.5, 0.3])
    assert (abs(counts / n - expected) <= 4 * np.sqrt(expected * (1 - expected) / n)).all()


@pytest.mark.parametrize("budget", [0.1, 0.3, 0.5, 2 / 3, 1.0, 0.02])
def test_periodic_spends_exactly_its_budget(budget):
    schedule = EvenlySpaced(frequency=budget, num_matchings=3)
    n = 3000
    rounds = [schedule.active(k) for k in range(n)]
    assert sum(1 for active in rounds if active) == pytest.approx(budget * n, abs=1)
    assert set(rounds) <= {(), (0, 1, 2)}
    gaps = np.diff([k for k, active in enumerate(rounds) if active])
    assert gaps.max() - gaps.min() <= 1


def test_cycles_repeat():
    cycle = Cycle(cycle=((0,), (), (2, 1)), num_matchings=3)
    assert list(cycle.actives(1, 6)) == [(), (2, 1), (0,), (), (2, 1)]


def test_bad_schedules_are_refused():
    with pytest.raises(PlanError, match="in \\[0, 1\\]"):
        Bernoulli(probabilities=(1.2,), seed=0)
    with pytest.raises(PlanError, match="seed"):
        Bernoulli(probabilities=(0.5,), seed=-1)
    with pytest.raises(PlanError, match="every matching once"):
        Bernoulli(probabilities=(0.5, 0.5), seed=0, groups=((0,),))
    with pytest.raises(PlanError, match="share"):
        Bernoulli(probabilities=(0.5, 0.4), seed=0, groups=((0, 1),))
    with pytest.raises(PlanError, match="more than 1"):
        Choice(probabilities=(0.8, 0.8), seed=0)
    with pytest.raises(PlanError, match="at least one round"):
        Cycle(cycle=(), num_matchings=1)


class Backwards(Cycle):
    """A user's own: the cycle from its end."""

    def active(self, k):
        return self.cycle[-1 - k % len(self.cycle)]

    def to_json(self):
        return {"kind": "tests-backwards", "cycle": [list(active) for active in self.cycle]}


class EveryOther(Schedule):
    """A user's own, with no more than must be said: matching 0 at even iterations."""

    probabilities = (0.5, 0.0)
    seed = 0
    period = ((0,), ())

    def active(self, k):
        return self.period[k % 2]

    def expected_time(self, timing, matchings):
        return 0.5 * timing.matching_time(matchings[0])

    def to_json(self):
        return {"kind": "tests-every-other"}


def test_the_rest_of_a_schedule_follows_from_its_period():
    own, cycle = EveryOther(), Cycle(cycle=((0,), ()), num_matchings=2)
    for name in ("uses", "coins", "exclusive", "largest", "period", "probabilities"):
        assert getattr(own, name) == getattr(cycle, name), name
    assert list(own.actives(1, 4)) == list(cycle.actives(1, 4))
    plan = matcha.plan(matcha.families.path(3), 1.0, "periodic")
    plans = [plan.with_process(schedule=schedule) for schedule in (own, cycle)]
    assert plans[0].expected_comm_time == plans[1].expected_comm_time == 0.5
    assert plans[0].rho == plans[1].rho
    assert list(plans[0].rounds(0, 9)) == list(plans[1].rounds(0, 9))


def read_backwards(document, probabilities, seed):
    cycle = tuple(tuple(active) for active in document["cycle"])
    return Backwards(cycle=cycle, num_matchings=len(probabilities), seed=seed)


def test_a_schedule_of_ones_own_is_saved_once_it_is_registered(tmp_path):
    plan = matcha.plan(matcha.families.ring(4), 0.5, Greedy(effort="none"))
    own = Backwards(cycle=((0,), (1,), ()), num_matchings=len(plan.matchings))
    plan = plan.with_process(schedule=own)
    path = tmp_path / "plan.json"
    path.write_text("what was there before")
    with pytest.raises(PlanError, match="register_schedule"):
        plan.save(path)
    assert path.read_text() == "what was there before"
    register_schedule("tests-backwards", read_backwards)
    register_schedule("tests-backwards", read_backwards)
    plan.save(path)
    again = matcha.Plan.load(path)
    assert [again.round(k).indices for k in range(4)] == [(), (1,), (0,), ()]
    assert again.digest == plan.digest
    with pytest.raises(InputError, match="another name"):
        register_schedule("cycle", read_backwards)


def test_a_kind_that_nobody_registered_is_named():
    document = matcha.plan(matcha.families.ring(4), 0.5, "matcha").to_json()
    document["schedule"] = {"kind": "somebody-elses"}
    with pytest.raises(PlanError, match=r"somebody-elses.*register_schedule"):
        matcha.Plan.from_json(document)


@pytest.mark.parametrize("k", [1.5, "3", None])
def test_rounds_are_counted_in_whole_numbers(k):
    plan = matcha.plan(matcha.families.ring(4), 0.5, "periodic")
    for ask in (plan.round, plan.rounds, plan.mixing_matrix):
        with pytest.raises(InputError, match="iterations are whole numbers"):
            ask(k)
    assert plan.round(np.int64(3)) == plan.round(3)
