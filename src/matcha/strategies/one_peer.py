"""One-peer exponential: everyone sends to the worker 1, 2, 4, … places further on, in turn.

One message out and one in a round, each with another peer: as long as a matching where links carry
both ways at once. For a power of two, log2(m) rounds leave every worker with the mean.
"""

from __future__ import annotations

from matcha.errors import InputError
from matcha.plans import Plan
from matcha.strategies.finite_time import repeated
from matcha.strategies.greedy.circulant import exponential_hops, messages
from matcha.strategies.strategy import Request


def build(request: Request) -> Plan:
    """Plan to hop 1, 2, 4, … places, again and again.

    Raises:
        InputError: Links are missing.
    """
    m = request.topology.num_workers
    rounds = tuple((messages(m, hop),) for hop in exponential_hops(m))
    arrows = set(request.topology.arrows)
    missing = next((e for round_ in rounds for e in round_[0] if e not in arrows), None)
    if missing is not None:
        raise InputError(
            f"one-peer needs the link from worker {missing[0]} to {missing[1]}, which the topology "
            "does not have: use greedy, which works anywhere."
        )
    exact = "; exact consensus after all of them" if m & (m - 1) == 0 else ""
    return repeated(request, rounds, alpha=0.5, note=f"hops of {len(rounds)} rounds{exact}.")
