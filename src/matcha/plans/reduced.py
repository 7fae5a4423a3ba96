"""Plans for those who are left: the same rounds without some workers' or some links' meetings.

Nothing is planned anew, so the result is exact, takes no time, and is the same wherever it is made
from the same plan: what is left out at run time, one meeting at a time, is what is left out here.
"""

from __future__ import annotations

from collections.abc import Iterable

from matcha.errors import InputError
from matcha.topology import Link, Matching, Topology

__all__ = ["kept", "known_links", "known_workers", "numbered_anew"]


def known_workers(topology: Topology, workers: Iterable[int]) -> frozenset[int]:
    """The workers, each of which the topology has.

    Raises:
        InputError: It has not.
    """
    found = frozenset(workers)
    for worker in sorted(found):
        if not 0 <= worker < topology.num_workers:
            raise InputError(f"there is no worker {worker} among {topology.num_workers}.")
    return found


def known_links(topology: Topology, links: Iterable[Link]) -> frozenset[Link]:
    """The links as the topology spells them.

    Raises:
        InputError: It has no such link.
    """
    found = set()
    for i, j in links:
        link = (i, j) if topology.directed or i < j else (j, i)
        if link not in topology.links:
            raise InputError(f"there is no link between workers {i} and {j}.")
        found.add(link)
    return frozenset(found)


def kept(
    matchings: tuple[Matching, ...], workers: frozenset[int], links: frozenset[Link]
) -> tuple[Matching, ...]:
    """The matchings without what is gone; one of which nothing is left stays as an empty one.

    >>> kept((((0, 1), (2, 3)), ((1, 2),)), frozenset([1]), frozenset())
    (((2, 3),), ())
    """
    return tuple(
        tuple(li for li in matching if li not in links and not workers.intersection(li))
        for matching in matchings
    )


def numbered_anew(
    topology: Topology, matchings: tuple[Matching, ...], gone: frozenset[int]
) -> tuple[Topology, tuple[Matching, ...]] | None:
    """Topology and matchings of those who are left, counted from 0; None where they fall apart."""
    left = [worker for worker in range(topology.num_workers) if worker not in gone]
    number = {worker: k for k, worker in enumerate(left)}
    one_way = topology.directed
    links = sorted({li if one_way else (min(li), max(li)) for some in matchings for li in some})
    try:
        rest = Topology.from_links(
            [(number[i], number[j]) for i, j in links], len(left), directed=topology.directed
        )
    except InputError:
        return None
    return rest, tuple(tuple((number[i], number[j]) for i, j in m) for m in matchings)
