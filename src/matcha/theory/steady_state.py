"""The steady state: how far apart workers stay under gradient noise, and how fast they agree.

Convention for the consensus error. Each iteration adds unit gradient noise and then mixes,
X ← E[W (X + I − J) Wᵀ]; the error is tr(X)/m in the steady state, measured after mixing and
averaged over iterations. With learning rate η and gradient noise of variance σ² per worker, the
workers' mean squared distance to their average settles near η²σ² times it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from matcha._numerics.spectra import Array, laplacian
from matcha.errors import InputError
from matcha.mixing import contraction_factor, laplacian_extremes, moments
from matcha.rounds import RoundProcess
from matcha.schedules import Active
from matcha.theory import cycles
from matcha.theory.cycles import Turn

Operator: TypeAlias = Callable[[Array], Array]
Matrices: TypeAlias = Sequence[Array | None]
"""W of each iteration of a cycle; None where no worker talks."""
_TOLERANCE = 1e-10
_SETTLING = 10_000  # cycles until ω repeats; it contracts like everything else
_GONE = 1e-7  # an eigenvalue of 0 that comes several times is found so well
_DOUBLINGS = 30  # rounds until nothing more is left than rounding errors: 2^30
MAX_WORKERS = 512
"""Beyond this the exact covariance (m × m, solved for) is too slow to be a default."""


def consensus_error(process: RoundProcess, *, max_workers: int = MAX_WORKERS) -> float | None:
    """The steady-state consensus error tr(X)/m of any rounds, exactly.

    Rounds that are drawn: the fixed point of the expected second-moment map. Rounds that repeat:
    the periodic solution, averaged over a period.

    Args:
        process: The rounds to analyse.
        max_workers: Return None for more workers rather than take minutes.

    Returns:
        The error, infinite where consensus is never reached; None where m is too large.

    >>> import matcha
    >>> plan = matcha.plan(matcha.families.ring(4), budget=1.0, strategy="vanilla")
    >>> round(consensus_error(plan.process), 5)
    0.09375
    """
    if process.num_workers > max_workers and "consensus_error" not in process.figures:
        return None
    return process.figure("consensus_error", _consensus_error)


def _consensus_error(process: RoundProcess) -> float:
    if process.schedule.period is not None:
        return cycle_error(process)
    operator = second_moment(process)
    return fixed_point_error(operator, process.num_workers, symmetric=adds_up(process))


def drift_error(process: RoundProcess) -> float | None:
    """The steady-state disagreement tr(X)/m that gradients with fixed differences cause.

    Where workers' gradients differ by the same vectors at every iteration (heterogeneous data),
    noise does not average out over time: x ← W(x + g) with g fixed, of covariance I − J over
    directions. With learning rate η and dissimilarity ζ² the workers' mean squared distance to
    their average settles near η²ζ² times it. Theorem 2 bounds it by ρ/(1 − √ρ)².

    Returns:
        The error, infinite where consensus is never reached; None where m is too large.
    """
    m = process.num_workers
    if m > MAX_WORKERS:
        return None
    noise = cycles.centering(m)
    if process.schedule.period is not None:
        return cycle_drift(process)
    symmetric = adds_up(process)
    mean = noise.copy()
    for p, coin in process.schedule.coins:
        L = p * process.link_scale * coin_laplacian(process, coin).toarray()
        mean = mean - L if symmetric else (np.eye(m) - L) @ mean
    if float(np.abs(np.linalg.eigvals(mean)).max()) > 1 - 1e-12:
        return math.inf
    # C = E[x gᵀ] settles first; then X has the source (I − J) + C + Cᵀ.
    C = np.linalg.solve(np.eye(m) - mean, mean @ noise)
    source = noise + C + C.T
    return fixed_point_error(second_moment(process), m, symmetric=symmetric, noise=source)


def contraction(process: RoundProcess) -> float:
    """ρ = ‖E[WᵀW] − J‖₂ of any rounds; over a cycle, ‖Φ − J‖^(2 / cycle length).

    Where the rounds of a cycle are one and the same or empty (the paper's periodic DecenSGD), it
    is ρ of the expected W², not of a whole period.
    """
    return process.figure("rho", _contraction)


def _contraction(process: RoundProcess) -> float:
    schedule, m = process.schedule, process.num_workers
    if schedule.period is not None:
        if averages_over_cycle(process):
            return cycle_contraction(process)
        return _shared_contraction(process, next(active for active in schedule.largest if active))
    if process.mixing == "laplacian" and not schedule.exclusive:
        groups = tuple(coin for _, coin in schedule.coins)
        of = moments(process.matchings, schedule.probabilities, m, groups, process.weights)
        return contraction_factor(of, process.link_scale)
    if schedule.exclusive and process.weights is None:
        # E[L²] = 2L̄: every direction shrinks by 2w(1 − w) of its share of L̄.
        return 1.0 - 2 * process.alpha * (1 - process.alpha) * _connectivity(process)
    second = second_moment(process, adjoint=True)(np.eye(m)) - 1 / m
    return float(np.linalg.norm((second + second.T) / 2, 2))


def averages_over_cycle(process: RoundProcess) -> bool:
    """Whether ρ is a mean over a cycle, rather than the norm of one iteration.

    The two do not compare: exact consensus after a cycle makes the mean 0, however much
    disagreement there is on the way. The consensus error compares all plans.
    """
    if process.schedule.period is None:
        return False
    active = [some for some in process.schedule.largest if some]
    return not ((process.mixing == "laplacian" or process.is_exact) and len(active) == 1)


def _shared_contraction(process: RoundProcess, active: Active) -> float:
    """1 − f + f‖W − J‖² for a round W that comes in a share f of the iterations."""
    share = process.schedule.probabilities[active[0]]
    if process.is_exact:
        return 1.0 - share
    ends = laplacian_extremes(coin_laplacian(process, active), process.topology)
    worst = max((1.0 - process.link_scale * value) ** 2 for value in ends)
    return 1.0 - share + share * worst


def connectivity(process: RoundProcess) -> float:
    """λ₂ of the expected topology Σ p_j L_j (eq. 5), of any rounds."""
    return process.figure("algebraic_connectivity", _connectivity)


def _connectivity(process: RoundProcess) -> float:
    # A message is half an exchange; where links go both ways it counts for the link either way.
    part = 0.5 if process.is_one_way else 1.0
    weights = part * np.array(list(process.link_uses.values()))
    if not weights.any():
        return 0.0
    mean = laplacian(process.topology.link_array, process.num_workers, weights)
    return laplacian_extremes(mean, process.topology)[0]


# -- rounds that repeat: disagreement averaged over a period, and its decay ------------------------


def cycle_error(process: RoundProcess) -> float:
    """tr(X)/m averaged over a period; infinite where it never settles."""
    m = process.num_workers
    if process.mixing == "relay":
        return _relay_error(process)
    if process.needs_push_sum:
        return push_sum_error(mixing_matrices(process), m)
    if process.mixing != "laplacian" and not process.is_exact:
        turns = _turns(process)
        # Without a path between some workers nothing settles; rounding must not hide it.
        joined = cycles.connects(turns, m)
        state = cycles.steady_state(turns, m, process.alpha) if joined else None
        return math.inf if state is None else state.error
    if averages_over_cycle(process):
        return _disagreement(mixing_matrices(process), m, drift=False)
    return _commuting_error(mixing_matrices(process), m)


def cycle_drift(process: RoundProcess) -> float:
    """The disagreement that gradients with fixed differences cause, averaged over a period."""
    if process.mixing == "relay":
        return _relay_drift(process)
    return _disagreement(mixing_matrices(process), process.num_workers, drift=True)


def cycle_contraction(process: RoundProcess) -> float:
    """ρ of rounds that repeat: ‖Φ − J‖^(2 / length), Φ the product of their mixing matrices."""
    if process.mixing == "relay":
        return _relay_contraction(process)
    m = process.num_workers
    if process.mixing != "laplacian" and not process.is_exact:
        return cycles.contraction(_turns(process), m, process.alpha)
    matrices = mixing_matrices(process)
    steps = (W.__matmul__ for W in matrices if W is not None)
    return cycles.rescaled_contraction(steps, m, len(matrices))


def _disagreement(matrices: Matrices, m: int, *, drift: bool) -> float:
    """tr(X)/m averaged over a cycle, under fresh unit noise or, with `drift`, always the same."""
    noise, zero = cycles.centering(m), np.zeros((m, m))

    def advance(X: Array, C: Array) -> tuple[Array, Array, float]:
        total = 0.0
        for W in matrices:
            X = X + noise
            if drift:  # C = E[x gᵀ] is what of x is along the noise g that comes again
                X, C = X + C + C.T, C + noise
            if W is not None:
                X, C = W @ X @ W.T, W @ C if drift else C
            total += float(np.trace(X))
        return X, C, total

    product, C = _product(matrices, noise), zero
    if drift:
        if float(np.linalg.norm(product, 2)) > 1 - 1e-12:
            return math.inf
        C = np.linalg.solve(np.eye(m) - product, advance(zero, zero)[1]).astype(np.float64)
    X = cycles.lyapunov(product, advance(zero, C)[0])
    return math.inf if X is None else advance(X, C)[2] / (len(matrices) * m)


def _commuting_error(matrices: Matrices, m: int) -> float:
    """One symmetric W in all active rounds: every eigenvector of W evolves alone."""
    active = [W for W in matrices if W is not None]
    shrink, factor = np.linalg.eigvalsh(active[0] - 1 / m) ** 2, np.ones(m - 1)
    # J's own direction carries no disagreement; W − J maps it to 0, so drop one zero.
    shrink = np.delete(shrink, int(np.argmin(shrink)))
    if shrink.max() > 1 - 1e-12:
        return math.inf

    def advance(state: Array) -> tuple[Array, float]:
        total = 0.0
        for W in matrices:
            state = state + 1
            state = state if W is None else state * shrink
            total += float(state.sum())
        return state, total

    for _ in active:  # one after another: a cycle may be millions of rounds long
        factor *= shrink
    return advance(advance(np.zeros(m - 1))[0] / (1 - factor))[1] / (len(matrices) * m)


def _product(matrices: Matrices, start: Array) -> Array:
    """What a whole cycle leaves of some values."""
    for W in matrices:
        start = start if W is None else W @ start
    return start


def _period(process: RoundProcess) -> tuple[Active, ...]:
    period = process.schedule.period
    assert period is not None  # rounds that are drawn have no period
    return period


def mixing_matrices(process: RoundProcess) -> Matrices:
    """W of each round of a period; None where no worker talks."""
    distinct, m = set(_period(process)), process.num_workers
    known = {active: process.round_of(active).matrix(m) for active in distinct if active}
    return [known.get(active) for active in _period(process)]


def push_sum_error(matrices: Matrices, m: int) -> float:
    """The error of push-sum, whose columns alone sum to one, over a cycle of rounds.

    With ω the weights and u = x − ω·(1ᵀx/m), a round maps u to Wu and ω to Wω, and what workers
    hold differs from the average by u/ω. Unit noise enters u without its part along ω.
    """
    start = _steady_weights(matrices, m)
    if float(start.min()) <= 0:
        return math.inf

    def advance(U: Array) -> tuple[Array, float]:
        total, omega, noise = 0.0, start, _noise_beside(start)
        for W in matrices:
            U = U + noise
            if W is not None:
                U, omega = W @ U @ W.T, W @ omega
                noise = _noise_beside(omega)
            total += float(np.sum(np.diagonal(U) / omega**2))
        return U, total

    transition = _product(matrices, np.eye(m)) - np.outer(start, np.ones(m)) / m
    fixed = cycles.lyapunov(transition, advance(np.zeros((m, m)))[0])
    return math.inf if fixed is None else advance(fixed)[1] / (len(matrices) * m)


def _noise_beside(omega: Array) -> Array:
    """The covariance of unit noise without its part along ω."""
    noise = np.eye(len(omega)) - np.outer(omega, np.ones(len(omega))) / len(omega)
    return np.asarray(noise @ noise.T)


def push_sum_weights(process: RoundProcess) -> tuple[float, ...]:
    """Push-sum's ω of every worker, averaged over a period of messages that repeat.

    >>> import matcha
    >>> from matcha.strategies import Rounds
    >>> rounds = [[[(0, 1)]], [[(1, 0)]]]  # in turn: the last sender holds less
    >>> plan = matcha.plan(matcha.families.path(2), 1.0, Rounds(rounds=rounds, mixing="push"))
    >>> [round(share, 6) for share in push_sum_weights(plan.process)]
    [1.0, 1.0]
    """
    matrices, m = mixing_matrices(process), process.num_workers
    omega, total = _steady_weights(matrices, m), np.zeros(m)
    for wait, active in cycles.turns_of([] if W is None else [W] for W in matrices):
        total += (wait - 1) * omega
        omega = _product(active, omega)
        total += omega
    return tuple((total / len(matrices)).tolist())


def _steady_weights(matrices: Matrices, m: int) -> Array:
    """ω at the start of a cycle, once it repeats from cycle to cycle."""
    omega = np.ones(m)
    for _ in range(_SETTLING):
        before, omega = omega, _product(matrices, omega)
        if float(np.abs(omega - before).max()) < 1e-14:
            break
    return omega


def _turns(process: RoundProcess) -> list[Turn]:
    shares = process.weights or (None,) * len(process.matchings)
    known = [
        cycles.step(matching, some, push=process.mixing == "push")
        for matching, some in zip(process.matchings, shares, strict=True)
    ]
    return [
        (iterations, [known[j] for j in active if len(known[j].i)])
        for iterations, active in cycles.turns_of(_period(process))
    ]


# -- rounds that are drawn: the second moment of disagreement -------------------------------------
# A schedule of coins maps the covariance X to E[W X Wᵀ]; the fixed point of X ← E[W (X + I − J)Wᵀ]
# is found without forming that m² × m² map.


def second_moment(process: RoundProcess, *, adjoint: bool = False) -> Operator:
    """X ↦ E[W X Wᵀ] of rounds that are drawn, or its adjoint E[Wᵀ X W]."""
    matchings, schedule = process.matchings, process.schedule
    if process.mixing == "laplacian" and not schedule.exclusive:
        return _laplacian(process)
    if any(len(coin) > 1 for _, coin in schedule.coins):
        raise InputError("pairwise mixing needs a coin for each matching, not one for a group.")
    shares = process.weights or (None,) * len(matchings)
    drawn = [(p, j) for p, (j,) in schedule.coins if p > 0 and matchings[j]]
    chain = [(p, cycles.step(matchings[j], shares[j])) for p, j in drawn]
    if adjoint and not schedule.exclusive:
        chain.reverse()
    return partial(
        cycles.expected_conjugate,
        chain=chain,
        weight=process.alpha,
        exclusive=schedule.exclusive,
    )


def adds_up(process: RoundProcess) -> bool:
    """Whether E[W] is I minus a sum over matchings, not a product over them; then W = Wᵀ."""
    return process.mixing == "laplacian" or process.schedule.exclusive


def coin_laplacian(process: RoundProcess, coin: Active) -> Any:
    """The Laplacian of what a coin activates; each link by its weight where it has one."""
    links = [link for j in coin for link in process.matchings[j]]
    shares = process.weights
    weights = None if shares is None else [w for j in coin for w in shares[j]]
    return laplacian(links, process.num_workers, weights)


def _laplacian(process: RoundProcess) -> Operator:
    """W = I − α Σ b_c L_c: mean part plus α² Σ p(1 − p) L_c X L_c."""
    parts = []
    mean, alpha = np.eye(process.num_workers), process.link_scale
    for p, coin in process.schedule.coins:
        L = coin_laplacian(process, coin)
        mean -= alpha * p * L.toarray()
        if 0 < p < 1:
            parts.append((alpha * alpha * p * (1 - p), L))

    def apply(X: Array) -> Array:
        result = mean @ X @ mean
        for scale, L in parts:
            result += scale * (L @ (L @ X).T)
        return result

    return apply


def fixed_point_error(
    operator: Operator, m: int, *, symmetric: bool, noise: Array | None = None
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


# -- relayed sums (RelaySum), whose rounds depend on the ones before ------------------------------
# A round is linear in x and in the sums that were sent last, so it is one matrix over both. There
# is one round every H iterations.


def relay_matrix(process: RoundProcess) -> Array:
    """The matrix of a round once all sums have come: from (x, sums before) to (x, sums).

    >>> import matcha
    >>> relay_matrix(matcha.plan("path:2", 1.0, "relaysum").process)[:2, :2].tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    m = process.num_workers
    arrows = [a for matching in process.matchings for i, j in matching for a in ((i, j), (j, i))]
    sends, arrives = np.zeros((len(arrows), m)), np.zeros((m, len(arrows)))
    relays = np.zeros((len(arrows), len(arrows)))
    for n, (i, j) in enumerate(arrows):
        sends[n, i] = arrives[j, n] = 1
        relays[n] = [to == i and k != j for k, to in arrows]
    sums = np.hstack([sends, relays])
    own = np.hstack([np.eye(m), np.zeros((m, len(arrows)))])
    return np.vstack([(own + arrives @ sums) / m, sums])


def _iterations_per_round(process: RoundProcess) -> float:
    period = _period(process)
    return len(period) / sum(map(bool, period))


def _relay_contraction(process: RoundProcess) -> float:
    """|λ|^(2 / H), λ the largest eigenvalue of a round but for the average's, which is 1."""
    sizes = np.sort(np.abs(np.linalg.eigvals(relay_matrix(process))))
    left = sizes[-2] if sizes[-2] > _GONE else 0.0
    return float(left ** (2 / _iterations_per_round(process)))


def _relay_error(process: RoundProcess) -> float:
    """tr(X)/m under unit noise in every iteration, averaged over iterations."""
    m, H = process.num_workers, _iterations_per_round(process)
    T = relay_matrix(process)
    noise = np.zeros_like(T)
    noise[:m, :m] = H * np.eye(m)
    total, power = T @ noise @ T.T, T
    for _ in range(_DOUBLINGS):  # Σ Tᵏ noise Tᵏᵀ; its common part grows, and is taken off
        total, power = total + power @ total @ power.T, power @ power
    centre = cycles.centering(m)
    left = float(np.trace(centre @ total[:m, :m] @ centre))
    return (left + (m - 1) * (H - 1) / 2) / m


def _relay_drift(process: RoundProcess) -> float:
    """tr(X)/m under gradients with fixed differences, averaged over iterations."""
    m, H = process.num_workers, _iterations_per_round(process)
    T = relay_matrix(process)
    centre = cycles.centering(m)
    start = np.zeros((len(T), m))
    start[:m] = centre
    after = centre @ np.linalg.lstsq(np.eye(len(T)) - T, H * T @ start, rcond=None)[0][:m]
    steps = np.arange(round(H))
    return float(np.mean([((after + k * centre) ** 2).sum() for k in steps])) / m
