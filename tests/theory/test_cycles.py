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
    return cycles.turns_of(rounds)


@pytest.mark.parametrize("weight", [0.5, 0.65])
def test_the_adjoint_prices_a_covariance(weight):
    turns = some_cycle()
    state = cycles.steady_state(turns, 8, weight)
    V = cycles.steady_adjoint(turns, 8, weight)
    # A disturbance S at the start of a cycle costs ⟨V, S⟩ in all later traces.
    rng = np.random.default_rng(1)
    root = rng.normal(size=(8, 8))
    S = root @ root.T
    S = cycles.centering(8) @ S @ cycles.centering(8)
    X, cost = S.copy(), 0.0
    for _ in range(200):
        cost += cycles.advance(X, turns, weight, np.zeros((8, 8)))
    assert cost == pytest.approx(float(np.sum(V * S)), rel=1e-9)
    assert np.allclose(state.covariance, state.covariance.T)


def test_contraction_of_short_and_very_long_cycles():
    turns = some_cycle()
    norm = np.linalg.norm(cycles.transition(turns, 8, 0.5), 2)
    assert cycles.contraction(turns, 8, 0.5) == pytest.approx(norm ** (2 / cycles.length(turns)))
    # 400 repetitions multiply to far below the smallest float, yet the rate stays the rate.
    spectral = max(abs(np.linalg.eigvals(cycles.transition(turns, 8, 0.5))))
    long_run = cycles.contraction(turns * 400, 8, 0.5)
    assert long_run == pytest.approx(spectral ** (2 / cycles.length(turns)), rel=1e-2)


def test_exact_consensus_contracts_to_nothing():
    cube = families.hypercube(3)
    turns = [
        (1, [cycles.step(tuple(e for e in cube.links if e[0] ^ e[1] == 1 << b)) for b in range(3)])
    ]
    assert cycles.contraction(turns, 8, 0.5) == 0.0
    assert cycles.steady_state(turns, 8, 0.5).error == pytest.approx(0.0, abs=1e-15)


def test_a_cut_that_is_never_crossed_is_found():
    halves = cycles.turns_of([[cycles.step(((0, 1), (2, 3)))], []])
    assert not cycles.connects(halves, 4)
    assert cycles.contraction(halves, 4, 0.5) == pytest.approx(1.0)
    assert cycles.steady_state(halves, 4, 0.5) is None
    assert cycles.connects([*halves, (1, [cycles.step(((1, 2),))])], 4)
    assert not cycles.connects([(1, [])], 2)


def test_a_long_silence_is_one_turn_and_counts_in_full():
    step = cycles.step(((0, 1), (2, 3)))
    other = cycles.step(((1, 2),))
    rounds = [[], [], [step], [], [other], [], []]
    turns = cycles.turns_of(rounds)
    assert [iterations for iterations, _ in turns] == [3, 2, 2]
    one_by_one = [(1, matchings) for matchings in rounds]
    for weight in (0.5, 0.6):
        short, long = (cycles.steady_state(cycle, 4, weight) for cycle in (turns, one_by_one))
        assert short.error == pytest.approx(long.error, rel=1e-12)
        assert np.allclose(short.covariance, long.covariance)
        prices = [cycles.steady_adjoint(cycle, 4, weight) for cycle in (turns, one_by_one)]
        assert np.allclose(*prices)
        assert cycles.contraction(turns, 4, weight) == pytest.approx(
            cycles.contraction(one_by_one, 4, weight)
        )


def test_messages_round_a_circle_are_the_matrix_and_its_transpose():
    ring = cycles.step(((0, 1), (1, 2), (2, 0)), push=True)
    x = np.eye(4)
    cycles.mix(x, ring, 0.3)
    shift = np.eye(4)
    shift[:3] = np.eye(4)[[2, 0, 1]]
    assert np.allclose(x, 0.7 * np.eye(4) + 0.3 * shift)
    back = np.eye(4)
    cycles.mix_back(back, ring, 0.3)
    assert np.allclose(back, x.T)
    turns = [(2, [ring]), (1, [cycles.step(((2, 3),), [0.4])])]
    V, state = cycles.steady_adjoint(turns, 4, 0.3), cycles.steady_state(turns, 4, 0.3)
    S = np.outer([1.0, -1, 0, 0], [1.0, -1, 0, 0])
    X, cost = S.copy(), 0.0
    for _ in range(400):
        cost += cycles.advance(X, turns, 0.3, np.zeros((4, 4)))
    assert cost == pytest.approx(float(np.sum(V * S)), rel=1e-9)
    assert state.error > 0
