"""What theory promises: steady-state consensus error, Theorem 2's bound, the admissible rate.

Convention for the consensus error. Each iteration adds unit gradient noise and then mixes,
X ← E[W (X + I − J) Wᵀ]; the error is tr(X)/m in the steady state, measured after mixing and
averaged over iterations. With learning rate η and gradient noise of variance σ² a worker, the
workers' mean squared distance to their average settles near η²σ² times it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TypeAlias

import numpy as np

from matcha import cycles
from matcha.cycles import Array, Step
from matcha.errors import InputError
from matcha.pairwise import expected_conjugate
from matcha.plans import Plan
from matcha.rounds import Mixing, Round
from matcha.schedules import Bernoulli, Choice, Cycle, Periodic
from matcha.topology import Matching, laplacian

MAX_WORKERS = 512
"""Beyond this the exact covariance (m × m, solved for) is too slow to be a default."""

_Operator: TypeAlias = Callable[[Array], Array]
_TOLERANCE = 1e-10
_MAX_DENOMINATOR = 2000


def consensus_error(plan: Plan, *, max_workers: int = MAX_WORKERS) -> float | None:
    """The steady-state consensus error tr(X)/m of any plan, exactly.

    Independent and one-at-a-time activation: the fixed point of the expected second-moment map.
    Periodic and cyclic schedules: the periodic solution, averaged over a period.

    Args:
        plan: What to analyse; only its matchings, schedule, mixing and weight matter.
        max_workers: Return None for larger plans rather than take minutes.

    Returns:
        The error, infinite where the plan never reaches consensus; None where m is too large.

    >>> import matcha
    >>> plan = matcha.plan(matcha.families.ring(4), budget=1.0, strategy="vanilla")
    >>> round(consensus_error(plan), 5)
    0.09375
    """
    if plan.num_workers > max_workers:
        return None
    return schedule_error(
        plan.matchings, plan.schedule, plan.num_workers, mixing=plan.mixing, weight=plan.alpha
    )


def schedule_error(
    matchings: Sequence[Matching],
    schedule: Bernoulli | Choice | Periodic | Cycle,
    num_workers: int,
    *,
    mixing: Mixing,
    weight: float,
) -> float:
    """`consensus_error` before there is a plan: for a schedule over matchings."""
    if isinstance(schedule, Cycle):
        return _cycle_error(matchings, schedule.cycle, num_workers, mixing, weight)
    if isinstance(schedule, Periodic):
        everything = tuple(range(len(matchings)))
        rounds = _periodic_cycle(schedule.frequency, everything)
        return _cycle_error(matchings, rounds, num_workers, mixing, weight)
    if isinstance(schedule, Choice):
        operator = _choice_operator(matchings, schedule, num_workers, mixing, weight)
        return _fixed_point_error(operator, num_workers, symmetric=True)
    if all(p in (0.0, 1.0) for p in schedule.probabilities):
        always = tuple(j for j, p in enumerate(schedule.probabilities) if p == 1.0)
        return _cycle_error(matchings, (always,), num_workers, mixing, weight)
    if mixing == "laplacian":
        operator = _laplacian_operator(matchings, schedule, num_workers, weight)
        return _fixed_point_error(operator, num_workers, symmetric=True)
    operator = _pairwise_operator(matchings, schedule, weight)
    return _fixed_point_error(operator, num_workers, symmetric=False)


def drift_error(plan: Plan, *, max_workers: int = MAX_WORKERS) -> float | None:
    """The steady-state disagreement tr(X)/m that gradients with fixed differences cause.

    Where workers' gradients differ by the same vectors at every iteration (unlike data), noise
    does not average out over time: x ← W(x + g) with g fixed, of covariance I − J over
    directions. With learning rate η and dissimilarity ζ² the workers' mean squared distance to
    their average settles near η²ζ² times it. Theorem 2 bounds it by ρ/(1 − √ρ)².

    Returns:
        The error, infinite where the plan never reaches consensus; None where m is too large.
    """
    m = plan.num_workers
    if m > max_workers:
        return None
    noise = cycles.centering(m)
    schedule = plan.schedule
    if isinstance(schedule, (Bernoulli, Choice)):
        mean = noise.copy()
        for matching, p in zip(plan.matchings, schedule.probabilities, strict=True):
            L = p * plan.alpha * laplacian(matching, m).toarray()
            mean = mean - L if _adds_up(plan) else (np.eye(m) - L) @ mean
        if float(np.abs(np.linalg.eigvals(mean)).max()) > 1 - 1e-12:
            return math.inf
        # C = E[x gᵀ] settles first; then X has the source (I − J) + C + Cᵀ.
        C = np.linalg.solve(np.eye(m) - mean, mean @ noise)
        return _fixed_point_error(
            _operator(plan), m, symmetric=_adds_up(plan), noise=noise + C + C.T
        )
    return _cycle_drift(plan, noise)


def _adds_up(plan: Plan) -> bool:
    """Whether E[W] is I minus a sum over matchings, not a product over them."""
    return plan.mixing == "laplacian" or isinstance(plan.schedule, Choice)


def _cycle_drift(plan: Plan, noise: Array) -> float:
    m, length = plan.num_workers, _period(plan)
    matrices = [round_.matrix(m) if round_ else None for round_ in plan.rounds(0, length)]

    def advance(X: Array, C: Array) -> tuple[Array, Array, float]:
        total = 0.0
        for W in matrices:
            X = X + noise + C + C.T
            C = C + noise
            if W is not None:
                X, C = W @ X @ W.T, W @ C
            total += float(np.trace(X))
        return X, C, total

    zero = np.zeros((m, m))
    product = noise
    for W in matrices:
        product = product if W is None else W @ product
    if float(np.linalg.norm(product, 2)) > 1 - 1e-12:
        return math.inf
    C: Array = np.linalg.solve(np.eye(m) - product, advance(zero, zero)[1]).astype(np.float64)
    X = cycles.lyapunov(product, advance(zero, C)[0])
    return math.inf if X is None else advance(X, C)[2] / (length * m)


def _period(plan: Plan) -> int:
    if isinstance(plan.schedule, Cycle):
        return len(plan.schedule.cycle)
    assert isinstance(plan.schedule, Periodic)
    return len(_periodic_cycle(plan.schedule.frequency, ()))


def _operator(plan: Plan) -> _Operator:
    """X ↦ E[W X Wᵀ] of a plan with random rounds."""
    schedule, m = plan.schedule, plan.num_workers
    if isinstance(schedule, Choice):
        return _choice_operator(plan.matchings, schedule, m, plan.mixing, plan.alpha)
    assert isinstance(schedule, Bernoulli)
    if plan.mixing == "laplacian":
        return _laplacian_operator(plan.matchings, schedule, m, plan.alpha)
    return _pairwise_operator(plan.matchings, schedule, plan.alpha)


def error_optimal_alpha(plan: Plan) -> float:
    """The α that minimises the steady-state consensus error, for the plan's own schedule.

    ρ is a worst case over directions; the error is an average over them, and its best α is
    usually smaller. For a fair comparison of strategies by consensus error, use this one.
    """
    from scipy.optimize import minimize_scalar

    def error(alpha: float) -> float:
        value = schedule_error(
            plan.matchings,
            plan.schedule,
            plan.num_workers,
            mixing=plan.mixing,
            weight=float(alpha),
        )
        return value if math.isfinite(value) else 1e300

    # The error blows up at both ends of the range of α and had one minimum wherever we looked.
    high = min(1.6 * plan.alpha, 1.0) if plan.mixing == "laplacian" else 0.95
    found = minimize_scalar(
        error, bounds=(0.2 * plan.alpha, high), method="bounded", options={"xatol": 1e-5}
    )
    return float(found.x) if error(found.x) <= error(plan.alpha) else plan.alpha


def with_error_optimal_alpha(plan: Plan) -> Plan:
    """The same plan with the α that minimises its consensus error; ρ is recomputed."""
    alpha = error_optimal_alpha(plan)
    changed = replace(plan, alpha=alpha)
    return replace(changed, consensus_error=consensus_error(changed), rho=contraction(changed))


def contraction(plan: Plan) -> float:
    """ρ = ‖E[WᵀW] − J‖₂ of any plan; over a cycle, ‖Φ − J‖^(2 / cycle length)."""
    m, schedule = plan.num_workers, plan.schedule
    if isinstance(schedule, (Cycle, Periodic)):
        rounds = (
            schedule.cycle
            if isinstance(schedule, Cycle)
            else _periodic_cycle(schedule.frequency, tuple(range(len(plan.matchings))))
        )
        return _cycle_contraction(plan.matchings, rounds, m, plan.mixing, plan.alpha)
    if isinstance(schedule, Choice):
        operator = _choice_operator(plan.matchings, schedule, m, plan.mixing, plan.alpha)
    elif plan.mixing == "laplacian":
        operator = _laplacian_operator(plan.matchings, schedule, m, plan.alpha)
    else:
        operator = _pairwise_operator(plan.matchings, schedule, plan.alpha, adjoint=True)
    second_moment = operator(np.eye(m)) - 1 / m
    return float(np.linalg.norm((second_moment + second_moment.T) / 2, 2))


# -- Theorem 2 ----------------------------------------------------------------------------------


def admissible_learning_rate(rho: float, smoothness: float) -> float:
    """The largest learning rate that Theorem 2 allows: ηL <= min{1, (ρ^-½ − 1)/4}.

    >>> admissible_learning_rate(0.25, smoothness=2.0)
    0.125
    """
    _check_rho(rho)
    if not smoothness > 0:
        raise InputError(f"the smoothness constant is {smoothness!r}, but it must be positive.")
    return min(1.0, (1 / math.sqrt(rho) - 1) / 4 if rho > 0 else 1.0) / smoothness


def gradient_bound(
    *,
    rho: float,
    num_workers: int,
    iterations: int,
    learning_rate: float,
    smoothness: float,
    gradient_variance: float,
    dissimilarity: float,
    initial_gap: float,
) -> float:
    """Theorem 2: a bound on the average of E‖∇F(x̄)‖² over the first K iterations.

    It covers every sequence of doubly stochastic mixing matrices with contraction ρ an iteration;
    for a cycle, which is not i.i.d., ρ is the contraction of the whole cycle per iteration and
    the bound holds up to the factor by which a part of a cycle may lag behind.

    Args:
        rho: Contraction ‖E[WᵀW] − J‖₂.
        num_workers: m.
        iterations: K.
        learning_rate: η.
        smoothness: L, the Lipschitz constant of the gradient.
        gradient_variance: σ², a bound on the variance of a worker's stochastic gradient.
        dissimilarity: ζ², a bound on the mean squared distance of workers' gradients to their mean.
        initial_gap: F(x̄₁) − F_inf.

    Raises:
        InputError: The learning rate is above `admissible_learning_rate`, so nothing is promised.

    >>> bound = gradient_bound(rho=0.0, num_workers=4, iterations=100, learning_rate=0.1,
    ...     smoothness=1.0, gradient_variance=1.0, dissimilarity=0.0, initial_gap=1.0)
    >>> round(bound, 6)
    0.225
    """
    limit = admissible_learning_rate(rho, smoothness)
    if not 0 < learning_rate <= limit * (1 + 1e-12):
        raise InputError(
            f"the learning rate is {learning_rate!r}, but Theorem 2 holds for 0 < rate <= "
            f"{limit:.4g} at rho {rho:.4g} and smoothness {smoothness:g}."
        )
    root, step = math.sqrt(rho), learning_rate * smoothness
    D = 6 * step**2 * rho / (1 - root) ** 2
    synchronous = (
        2 * initial_gap / (learning_rate * iterations) + step * gradient_variance / num_workers
    )
    network = (
        2
        * step**2
        * rho
        / (1 - root)
        * (gradient_variance / (1 + root) + 3 * dissimilarity / (1 - root))
    )
    return (synchronous + network) / (1 - 2 * D)


def doubling_bound(num_workers: int, matchings_per_iteration: float) -> float:
    """A consensus error that no strategy goes below, whatever its links and weights.

    After a matchings, one worker's noise has reached at most 2^a workers, so it still has squared
    length max(2^-a, 1/m); and by convexity no timing beats an even one. Hence
    tr(X)/m >= Σ_{n>=1} (max(2^{-cn}, 1/m) − 1/m) at c matchings an iteration.

    >>> doubling_bound(8, 1.0)
    0.5
    """
    if not matchings_per_iteration > 0:
        raise InputError("a bound needs a positive number of matchings an iteration.")
    last = math.ceil(math.log2(num_workers) / matchings_per_iteration)
    ages = np.arange(1, last + 1)
    lengths = np.maximum(2.0 ** (-matchings_per_iteration * ages), 1 / num_workers)
    return float(np.sum(lengths - 1 / num_workers))


# -- the expected second-moment map -------------------------------------------------------------


def _laplacian_operator(
    matchings: Sequence[Matching], schedule: Bernoulli, m: int, alpha: float
) -> _Operator:
    """X ↦ E[W X W] for W = I − α Σ b_c L_c: mean part plus α² Σ p(1 − p) L_c X L_c."""
    coins = schedule.groups or tuple((j,) for j in range(len(matchings)))
    parts = []
    mean = np.eye(m)
    for coin in coins:
        p = schedule.probabilities[coin[0]]
        L = laplacian([link for j in coin for link in matchings[j]], m)
        mean -= alpha * p * L.toarray()
        if 0 < p < 1:
            parts.append((alpha * alpha * p * (1 - p), L))

    def apply(X: Array) -> Array:
        result = mean @ X @ mean
        for scale, L in parts:
            result += scale * (L @ (L @ X).T)
        return result

    return apply


def _pairwise_operator(
    matchings: Sequence[Matching], schedule: Bernoulli, weight: float, *, adjoint: bool = False
) -> _Operator:
    """X ↦ E[W X Wᵀ] for W = A_r ··· A_1, or its adjoint E[Wᵀ X W]: one matching at a time."""
    chain = [
        (p, cycles.step(matching))
        for matching, p in zip(matchings, schedule.probabilities, strict=True)
        if p > 0 and matching
    ]
    if any(len(group) > 1 for group in schedule.groups):
        raise InputError("pairwise mixing needs a coin for each matching, not one for a group.")
    if adjoint:
        chain.reverse()
    return lambda X: expected_conjugate(X, chain, weight)


def _choice_operator(
    matchings: Sequence[Matching], schedule: Choice, m: int, mixing: Mixing, weight: float
) -> _Operator:
    """X ↦ (1 − Σ p_j) X + Σ p_j W_j X W_j; a single matching mixes alike under both rules."""
    steps = [
        (p, cycles.step(matching))
        for matching, p in zip(matchings, schedule.probabilities, strict=True)
        if p > 0 and matching
    ]

    def apply(X: Array) -> Array:
        result: Array = X.copy()
        for p, ends in steps:
            mixed = X.copy()
            cycles.conjugate(mixed, ends, weight)
            result += p * (mixed - X)
        return result

    return apply


def _fixed_point_error(
    operator: _Operator, m: int, *, symmetric: bool, noise: Array | None = None
) -> float:
    """tr(X)/m for X = K(X + I − J), solving (I − K) X = K(I − J) without forming K."""
    from scipy.sparse.linalg import LinearOperator, cg, gmres

    centering = cycles.centering(m)
    source = operator(centering if noise is None else noise)

    def residual(x: Array) -> Array:
        # J is a fixed direction of K; projecting it out keeps the operator definite.
        X: Array = x.reshape(m, m)
        left: Array = X - operator(centering @ X @ centering)
        return left.reshape(m * m)

    system = LinearOperator((m * m, m * m), matvec=residual, dtype=np.float64)
    if symmetric:
        # Warm start: K(I − J) summed as if K were the scalar that its trace suggests.
        shrink = float(np.trace(source)) / (m - 1)
        guess = source / max(1 - shrink, 1e-6) if shrink < 1 else source
        x, failed = cg(system, source.ravel(), x0=guess.ravel(), rtol=_TOLERANCE, maxiter=5000)
    else:
        x, failed = gmres(system, source.ravel(), rtol=_TOLERANCE, restart=60, maxiter=100)
    X = x.reshape(m, m)
    # A steady state is positive semidefinite: no other solution of the equation is one.
    diverges = failed or float(np.linalg.eigvalsh((X + X.T) / 2)[0]) < -1e-6 * abs(np.trace(X))
    return math.inf if diverges else float(np.trace(X)) / m


# -- periodic solutions -------------------------------------------------------------------------


def _periodic_cycle(frequency: float, everything: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    exact = Fraction(repr(float(frequency))).limit_denominator(_MAX_DENOMINATOR)
    n, d = exact.numerator, exact.denominator
    return tuple(everything if (k + 1) * n // d > k * n // d else () for k in range(d))


def _cycle_error(
    matchings: Sequence[Matching],
    rounds: Sequence[tuple[int, ...]],
    m: int,
    mixing: Mixing,
    weight: float,
) -> float:
    if mixing == "pairwise":
        state = cycles.steady_state(_steps(matchings, rounds), m, weight)
        return math.inf if state is None else state.error
    matrices = _matrices(matchings, rounds, m, weight)
    if len(matrices) == 1:
        return _commuting_error(rounds, next(iter(matrices.values())), m)
    noise = cycles.centering(m)

    def advance(X: Array) -> tuple[Array, float]:
        total = 0.0
        for active in rounds:
            X = X + noise
            if active:
                W = matrices[active]
                X = W @ X @ W
            total += float(np.trace(X))
        return X, total

    product = noise
    for active in rounds:
        if active:
            product = matrices[active] @ product
    fixed = cycles.lyapunov(product, advance(np.zeros((m, m)))[0])
    return math.inf if fixed is None else advance(fixed)[1] / (len(rounds) * m)


def _commuting_error(rounds: Sequence[tuple[int, ...]], W: Array, m: int) -> float:
    """One symmetric W in all active rounds: every eigenvector of W evolves alone."""
    shrink = np.linalg.eigvalsh(W - 1 / m) ** 2
    # J's own direction carries no disagreement; W − J maps it to 0, so drop one zero.
    shrink = np.delete(shrink, int(np.argmin(shrink)))
    if shrink.max() > 1 - 1e-12:
        return math.inf
    state, factor = np.zeros(m - 1), np.ones(m - 1)
    for active in rounds:
        state += 1
        if active:
            state *= shrink
            factor *= shrink
    state /= 1 - factor
    total = 0.0
    for active in rounds:
        state += 1
        if active:
            state *= shrink
        total += float(state.sum())
    return total / (len(rounds) * m)


def _cycle_contraction(
    matchings: Sequence[Matching],
    rounds: Sequence[tuple[int, ...]],
    m: int,
    mixing: Mixing,
    weight: float,
) -> float:
    if mixing == "pairwise":
        return cycles.contraction(_steps(matchings, rounds), m, weight)
    matrices = _matrices(matchings, rounds, m, weight)
    if len(matrices) == 1:
        # The paper's periodic DecenSGD: ρ of the expected W² (not of a whole period).
        active = sum(bool(a) for a in rounds) / len(rounds)
        worst = float(np.linalg.norm(next(iter(matrices.values())) - 1 / m, 2)) ** 2
        return 1 - active + active * worst
    product = cycles.centering(m)
    for a in rounds:
        if a:
            product = matrices[a] @ product
    return float(np.linalg.norm(product, 2) ** (2 / len(rounds)))


def _matrices(
    matchings: Sequence[Matching], rounds: Sequence[tuple[int, ...]], m: int, weight: float
) -> dict[tuple[int, ...], Array]:
    return {
        active: Round(
            matchings=tuple(matchings[j] for j in active),
            indices=active,
            mixing="laplacian",
            weight=weight,
        ).matrix(m)
        for active in set(rounds)
        if active
    }


def _steps(matchings: Sequence[Matching], rounds: Sequence[tuple[int, ...]]) -> list[list[Step]]:
    known = [cycles.step(matching) for matching in matchings]
    return [[known[j] for j in active if len(known[j][0])] for active in rounds]


def _check_rho(rho: float) -> None:
    if not 0 <= rho < 1:
        raise InputError(f"rho is {rho!r}, but Theorem 2 needs 0 <= rho < 1.")
