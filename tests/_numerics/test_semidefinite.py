"""The interior-point method against closed forms and its own duality."""

import numpy as np
import pytest

from matcha._numerics.semidefinite import solve, solve_factored
from matcha.activation import knapsack_bound


def random_stack(seed: int, instances: int, variables: int, order: int):
    rng = np.random.default_rng(seed)
    factors = rng.standard_normal((instances, variables, order, 3))
    A = factors @ factors.swapaxes(-1, -2)
    a = rng.random((instances, 2, variables)) * order
    c = 0.5 + rng.random((instances, variables))
    return A, a, c, 0.4 * c.sum(1)


@pytest.mark.parametrize("seed", range(5))
def test_value_and_bound_meet(seed):
    A, a, c, b = random_stack(seed, instances=4, variables=6, order=8)
    solution = solve(A, a, c, b)
    for n in range(4):
        p = solution.p[n]
        assert (p > 0).all()
        assert (p < 1).all()
        assert c[n] @ p < b[n]
        value = min(
            np.linalg.eigvalsh(np.einsum("j,jab->ab", p, A[n]))[0],
            (a[n] @ p).min(),
        )
        gains = np.einsum("jab,ab->j", A[n], solution.Y[n]) + solution.y[n] @ a[n]
        bound = knapsack_bound(gains, c[n], b[n])
        assert value <= bound * (1 + 1e-12)
        assert bound - value <= 1e-7 * bound


def test_dual_is_positive_and_of_unit_trace():
    solution = solve(*random_stack(7, instances=3, variables=5, order=6))
    assert np.linalg.eigvalsh(solution.Y).min() >= -1e-14
    assert (solution.y >= 0).all()
    np.testing.assert_allclose(
        np.trace(solution.Y, axis1=1, axis2=2) + solution.y.sum(1), 1.0, rtol=1e-12
    )


def test_diagonal_matrices_make_a_linear_program():
    # max t with p_1 >= t, p_2 >= t, p_1 + p_2 <= 1: both get a half.
    A = np.array([[[[1.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 1.0]]]])
    solution = solve(A, np.empty((1, 0, 2)), np.ones((1, 2)), np.array([1.0]))
    np.testing.assert_allclose(solution.p[0], [0.5, 0.5], atol=1e-7)


def test_stacking_changes_nothing():
    A, a, c, b = random_stack(3, instances=5, variables=4, order=5)
    together = solve(A, a, c, b)
    for n in range(5):
        alone = solve(A[n : n + 1], a[n : n + 1], c[n : n + 1], b[n : n + 1])
        np.testing.assert_allclose(alone.p[0], together.p[n], atol=1e-6)


def test_factored_matrices_give_the_same_solution():
    rng = np.random.default_rng(5)
    D, owner = rng.standard_normal((14, 6)), np.repeat(np.arange(7), 2)
    A = np.array([D[owner == j].T @ D[owner == j] for j in range(7)])
    a, c = rng.random((2, 7)) * 6, 0.5 + rng.random(7)
    factored = solve_factored(D, owner, a, c, 0.4 * c.sum())
    stacked = solve(A[None], a[None], c[None], np.array([0.4 * c.sum()]))
    np.testing.assert_allclose(factored.p, stacked.p, atol=1e-6)
    np.testing.assert_allclose(factored.Y, stacked.Y, atol=1e-6)
