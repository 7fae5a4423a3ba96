"""CECA: the exact mean of any number of workers after ⌈log2 m⌉ messages each, and no fewer can do.

Everybody holds two sums: over the n workers before it, and the same with itself. A message from the
worker n + 1 places back with its own sum makes n grow to 2n + 1; one from n places back with the
sum before it makes n grow to 2n. The bits of m − 1, highest first, say which comes when; after the
last, n + 1 = m and everybody holds the sum of all (Ding et al., 2023: the two-port variant).

The two sums live within one round, so that a worker holds one model between iterations, as with any
other plan: messages are saved up and all sent in the iteration in which the last of them is due.
"""

from __future__ import annotations

from matcha.errors import InputError
from matcha.plans import Plan
from matcha.strategies.finite_time import repeated
from matcha.strategies.greedy.circulant import messages
from matcha.strategies.strategy import Request


def build(request: Request) -> Plan:
    """Plan an exact mean by hops, as often as the budget allows.

    Raises:
        InputError: Links are missing.
    """
    m = request.topology.num_workers
    hops = tuple(messages(m, hop) for hop in ceca_hops(m))
    arrows = set(request.topology.arrows)
    missing = next((arrow for hop in hops for arrow in hop if arrow not in arrows), None)
    if missing is not None:
        raise InputError(
            f"ceca needs the link from worker {missing[0]} to {missing[1]}, which the topology "
            "does not have: use greedy, which works anywhere."
        )
    note = f"exact consensus by {len(hops)} hops at once, of sums over ever more workers."
    return repeated(request, (hops,), alpha=1 / m, note=note)


def ceca_hops(num_workers: int) -> tuple[int, ...]:
    """How many places on everybody sends, message by message.

    >>> ceca_hops(8), ceca_hops(12), ceca_hops(27)
    ((1, 2, 4), (1, 1, 3, 6), (1, 2, 3, 7, 13))
    """
    hops, count = [], 0
    for bit in f"{num_workers - 1:b}":
        hop = count + int(bit)
        hops.append(hop)
        count += hop
    return tuple(hops)
