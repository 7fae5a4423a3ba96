"""Cycles: duality of state and adjoint, contraction against the plain product."""

import numpy as np
import pytest

from matcha import families
from matcha.theory import cycles


def some_cycle(seed=0, length=7, num_workers=8):
    topology = families.paper("er8")
    rng = np.random.default_rng(seed)
    rounds = []
    for _ in range(length):
        matchings = []
        for _ in range(rng.integers(0, 3)):
            busy, chosen = set(), []
            for i, j in rng.permutation(topology.link_array):
                if not busy & {i, j}:
                    busy |= {i, j}
                    chosen.append((int(i), int(j)))
            matchings.append(cycles.step(tuple(chosen)))
        rounds.append(matchings)
    return rounds


@pytest.mark.parametrize("weight", [0.5, 0.65])
def test_the_adjoint_prices_a_covariance(weight):
    rounds = some_cycle()
    state = cycles.steady_state(rounds, 8, weight)
    V = cycles.steady_adjoint(rounds, 8, weight)
    # A disturbance S at the start of a cycle costs ⟨V, S⟩ in all later traces.
    rng = np.random.default_rng(1)
    root = rng.normal(size=(8, 8))
    S = root @ root.T
    S = cycles.centering(8) @ S @ cycles.centering(8)
    X, cost = S.copy(), 0.0
    for _ in range(200):
        cost += cycles.advance(X, rounds, weight, np.zeros((8, 8)))
    assert cost == pytest.approx(float(np.sum(V * S)), rel=1e-9)
    assert np.allclose(state.covariance, state.covariance.T)


def test_contraction_of_short_and_very_long_cycles():
    rounds = some_cycle()
    norm = np.linalg.norm(cycles.transition(rounds, 8, 0.5), 2)
    assert cycles.contraction(rounds, 8, 0.5) == pytest.approx(norm ** (2 / len(rounds)))
    # 400 repetitions multiply to far below the smallest float, yet the rate stays the rate.
    spectral = max(abs(np.linalg.eigvals(cycles.transition(rounds, 8, 0.5))))
    long_run = cycles.contraction(rounds * 400, 8, 0.5)
    assert long_run == pytest.approx(spectral ** (2 / len(rounds)), rel=1e-2)


def test_exact_consensus_contracts_to_nothing():
    cube = families.hypercube(3)
    rounds = [
        [cycles.step(tuple(e for e in cube.links if e[0] ^ e[1] == 1 << b)) for b in range(3)]
    ]
    assert cycles.contraction(rounds, 8, 0.5) == 0.0
    assert cycles.steady_state(rounds, 8, 0.5).error == pytest.approx(0.0, abs=1e-15)


def test_a_cut_that_is_never_crossed_is_found():
    halves = [[cycles.step(((0, 1), (2, 3)))], []]
    assert not cycles.connects(halves, 4)
    assert cycles.contraction(halves, 4, 0.5) == pytest.approx(1.0)
    assert cycles.steady_state(halves, 4, 0.5) is None
    assert cycles.connects([*halves, [cycles.step(((1, 2),))]], 4)
    assert not cycles.connects([[]], 2)
