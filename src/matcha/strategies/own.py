"""The user's own list of rounds, repeated for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from matcha.errors import InputError
from matcha.plans import Plan
from matcha.schedules import Cycle
from matcha.strategies.parts import coloring, finished, spent_within
from matcha.strategies.request import Request
from matcha.topology import Matching


def build(request: Request) -> Plan:
    """Plan to repeat the rounds that the user brought.

    Raises:
        InputError: There are none, or they take more time than the budget allows.
    """
    if request.rounds is None:
        raise InputError("the rounds strategy needs rounds=[[[(i, j), …], …], …].")
    places: dict[Matching, int] = {}
    cycle = tuple(
        tuple(places.setdefault(matching, len(places)) for matching in round_)
        for round_ in request.rounds
    )
    if not places:
        raise InputError("nobody talks in any of the rounds given: give one a matching.")
    matchings, colors = tuple(places), coloring(request)
    schedule = Cycle(cycle=cycle, num_matchings=len(matchings), seed=request.seed)
    limit = request.budget * request.timing.round_time(colors)
    cost = schedule.expected_time(request.timing, matchings)
    spent_within(request, cost, limit, "the rounds")
    return finished(
        request,
        matchings=matchings,
        schedule=schedule,
        alpha=0.5 if request.mixing != "laplacian" else _laplacian_weight(request.rounds),
        num_colors=len(colors),
        notes=("the rounds are yours.",),
    )


def _laplacian_weight(rounds: Iterable[tuple[Matching, ...]]) -> float:
    """1 / (1 + the largest degree in a round): no worker's own weight goes below zero."""
    met = (Counter(w for links in round_ for link in links for w in link) for round_ in rounds)
    return 1 / (1 + max(max(counts.values(), default=0) for counts in met))
