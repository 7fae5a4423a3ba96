"""What theory promises of relayed sums, whose rounds depend on the ones before (RelaySum).

A round is linear in x and in the sums that were sent last, so it is one matrix over both. Rounds
are one every H iterations.
"""

from __future__ import annotations

import numpy as np

from matcha.rounds import RoundProcess
from matcha.theory.cycles import Array

_GONE = 1e-7  # an eigenvalue of 0 that comes several times is found so well
_DOUBLINGS = 30  # rounds until nothing more is left than rounding errors: 2^30


def transition(process: RoundProcess) -> Array:
    """The matrix of a round once all sums have come: from (x, sums before) to (x, sums).

    >>> import matcha
    >>> transition(matcha.plan("path:2", 1.0, "relaysum").process)[:2, :2].tolist()
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
    period = process.schedule.period
    assert period is not None  # rounds are repeated
    return len(period) / sum(map(bool, period))


def contraction(process: RoundProcess) -> float:
    """|λ|^(2 / H), λ the largest eigenvalue of a round but for the average's, which is 1."""
    sizes = np.sort(np.abs(np.linalg.eigvals(transition(process))))
    left = sizes[-2] if sizes[-2] > _GONE else 0.0
    return float(left ** (2 / _iterations_per_round(process)))


def error(process: RoundProcess) -> float:
    """tr(X)/m under unit noise in every iteration, averaged over iterations."""
    m, H = process.num_workers, _iterations_per_round(process)
    T = transition(process)
    noise = np.zeros_like(T)
    noise[:m, :m] = H * np.eye(m)
    total, power = T @ noise @ T.T, T
    for _ in range(_DOUBLINGS):  # Σ Tᵏ noise Tᵏᵀ; its common part grows, and is taken off
        total, power = total + power @ total @ power.T, power @ power
    centre = np.eye(m) - 1 / m
    left = float(np.trace(centre @ total[:m, :m] @ centre))
    return (left + (m - 1) * (H - 1) / 2) / m


def drift(process: RoundProcess) -> float:
    """tr(X)/m under gradients with fixed differences, averaged over iterations."""
    m, H = process.num_workers, _iterations_per_round(process)
    T = transition(process)
    centre = np.eye(m) - 1 / m
    start = np.zeros((len(T), m))
    start[:m] = centre
    after = centre @ np.linalg.lstsq(np.eye(len(T)) - T, H * T @ start, rcond=None)[0][:m]
    steps = np.arange(round(H))
    return float(np.mean([((after + k * centre) ** 2).sum() for k in steps])) / m
