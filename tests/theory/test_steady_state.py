"""The steady state of published plans and under drift; Theorem 2 against its limits."""

import numpy as np
import pytest
from benchmarks.parts.supports import doubling_bound
from tests.theory.brute import process

from matcha import families, theory
from matcha.errors import InputError
from matcha.schedules import Bernoulli, Choice, Cycle, EvenlySpaced

# DESIGN.md section 5: vanilla at its rho-optimal alpha.
VANILLA = {
    "er8": 0.60,
    "geometric16-d5": 2.28,
    "geometric16-d10": 0.85,
    "geometric16-d13": 0.22,
    "er16": 0.53,
}


@pytest.mark.parametrize("name", VANILLA)
def test_vanilla_gives_the_published_table(name):
    topology = families.paper(name)
    values = np.linalg.eigvalsh(topology.laplacian().toarray())
    matchings = families.paper_matchings(name)
    always = EvenlySpaced(frequency=1.0, num_matchings=len(matchings))
    alpha = 2 / (values[1] + values[-1])
    rounds = process(matchings, always, topology.num_workers, "laplacian", alpha)
    assert theory.consensus_error(rounds) == pytest.approx(VANILLA[name], abs=0.006)


def test_admissible_rate_and_bound():
    assert theory.admissible_learning_rate(0.0, 4.0) == 0.25
    assert theory.admissible_learning_rate(0.81, 1.0) == pytest.approx((1 / 0.9 - 1) / 4)
    common = {
        "num_workers": 16,
        "iterations": 1000,
        "learning_rate": 0.02,
        "smoothness": 1.0,
        "gradient_variance": 1.0,
        "dissimilarity": 0.5,
        "initial_gap": 1.0,
    }
    bounds = [theory.gradient_bound(rho=rho, **common) for rho in (0.0, 0.2, 0.5, 0.8)]
    assert bounds == sorted(bounds)
    assert bounds[0] == pytest.approx(2 / (0.02 * 1000) + 0.02 / 16)
    with pytest.raises(InputError, match="Theorem 2 holds for"):
        theory.gradient_bound(rho=0.99, **common)
    with pytest.raises(InputError, match="rho is 1"):
        theory.admissible_learning_rate(1.0, 1.0)
    with pytest.raises(InputError, match="smoothness"):
        theory.admissible_learning_rate(0.5, 0.0)


def test_nothing_beats_the_doubling_bound_and_a_hypercube_meets_it():
    cube = families.hypercube(4)
    matchings = tuple(
        tuple(link for link in cube.links if link[0] ^ link[1] == 1 << b) for b in range(4)
    )
    for rounds in (
        ((0,), (1,), (2,), (3,)),
        ((0, 1), (2, 3)),
        ((0,), (), (1,), (), (2,), (), (3,), ()),
    ):
        c = 4 / len(rounds)
        cycle = Cycle(cycle=rounds, num_matchings=len(matchings))
        error = theory.consensus_error(process(matchings, cycle, 16, "pairwise", 0.5))
        bound = doubling_bound(16, c)
        assert error >= bound - 1e-12
        if c >= 1:
            assert error == pytest.approx(bound)
    with pytest.raises(InputError):
        doubling_bound(8, 0.0)


@pytest.mark.parametrize("mixing", ["laplacian", "pairwise"])
@pytest.mark.parametrize("kind", ["coins", "choice", "cycle", "periodic"])
def test_drift_against_simulation(mixing, kind):
    matchings = families.paper_matchings("er8")
    p = (0.9, 0.5, 0.3, 0.2, 0.7)
    schedule = {
        "coins": Bernoulli(probabilities=p, seed=1),
        "choice": Choice(probabilities=tuple(q / 3 for q in p), seed=1),
        "cycle": Cycle(cycle=((0, 2), (), (4, 1), (3,)), num_matchings=5),
        "periodic": EvenlySpaced(frequency=0.5, num_matchings=5),
    }[kind]
    rounds = process(matchings, schedule, 8, mixing, 0.3)
    # All fixed differences at once: column i is the response to a unit gradient at worker i.
    g = np.eye(8) - 1 / 8
    x, total = np.zeros((8, 8)), 0.0
    for k, round_ in enumerate(rounds.rounds(0, 6200)):
        x = round_.mix(x + g) if round_ else x + g
        total += np.square(x).sum() if k >= 200 else 0.0
    random = kind in ("coins", "choice")
    assert theory.drift_error(rounds) == pytest.approx(
        total / 6000 / 8, rel=0.05 if random else 1e-6
    )
    # Differences that persist cost more than noise that does not.
    assert theory.drift_error(rounds) > theory.consensus_error(rounds)
