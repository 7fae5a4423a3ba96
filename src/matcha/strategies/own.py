"""The user's own list of rounds, repeated for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matcha.errors import InputError, PlanError
from matcha.plans import Plan
from matcha.rounds import Mixing
from matcha.schedules import Cycle
from matcha.strategies.parts import assemble_plan, check_affordable, sorted_pairs
from matcha.strategies.strategy import Request, Strategy, Weights
from matcha.topology import Matching, Topology, check_matchings


@dataclass(frozen=True, kw_only=True)
class Rounds(Strategy):
    """Your own list of rounds, repeated.

    Args:
        rounds: Each a list of matchings, which are lists of pairs of worker numbers; an empty round
            is an iteration without exchanges.
        mixing: `pairwise` (the default), `laplacian`, or `push` for (sender, receiver).
        alpha: Your own mixing weight.
        weights: As for `Vanilla`, with laplacian mixing.
    """

    name = "rounds"
    about = "your own list of rounds, repeated"
    mixings = ("pairwise", "laplacian", "push")
    needs_rounds = True
    has_budget = False
    rounds: Iterable[Iterable[Iterable[Sequence[int]]]] | None = None
    mixing: Mixing | None = None
    alpha: float | None = None
    weights: Weights | None = None

    def build(self, request: Request) -> Plan:
        """Plan to repeat the rounds that the user brought."""
        if self.rounds is None:
            raise InputError("the rounds strategy needs rounds=[[[(i, j), …], …], …].")
        rounds = _check_rounds(request.topology, self.rounds, push=request.mixing == "push")
        places: dict[Matching, int] = {}
        cycle = tuple(
            tuple(places.setdefault(matching, len(places)) for matching in round_)
            for round_ in rounds
        )
        if not places:
            raise InputError("no round has a matching: give at least one round one.")
        matchings = tuple(places)
        schedule = Cycle(cycle=cycle, num_matchings=len(matchings), seed=request.seed)
        cost = schedule.expected_time(request.timing, matchings)
        check_affordable(request, cost, request.budget * request.full_time, "the rounds")
        return assemble_plan(
            request,
            matchings=matchings,
            schedule=schedule,
            alpha=0.5 if request.mixing != "laplacian" else _laplacian_weight(rounds),
            notes=("the rounds are yours.",),
        )


def _check_rounds(
    topology: Topology, given: Any, *, push: bool
) -> tuple[tuple[Matching, ...], ...]:
    """The rounds with sorted pairs (messages, for push), verified against the topology."""
    try:
        rounds = tuple(sorted_pairs(round_, push=push) for round_ in given)
    except TypeError:
        raise PlanError("rounds are lists of matchings, [[[(i, j), …], …], …].") from None
    matchings = tuple(links for round_ in rounds for links in round_)
    check_matchings(topology, matchings, push=push)
    return rounds


def _laplacian_weight(rounds: Iterable[tuple[Matching, ...]]) -> float:
    """1 / (1 + the largest degree in a round): no worker's own weight goes below zero."""
    met = (Counter(w for links in round_ for link in links for w in link) for round_ in rounds)
    return 1 / (1 + max(max(counts.values(), default=0) for counts in met))
