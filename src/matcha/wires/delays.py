"""Delay models that know messages: what a wire really saves on a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from matcha.errors import InputError
from matcha.timing import (
    TIMINGS,
    LinkSeconds,
    RandomLinks,
    Scaled,
    Timing,
    register_timing,
)
from matcha.topology import Matching, Topology
from matcha.wires.wire import TopK, Wire


@dataclass(frozen=True, kw_only=True)
class Wired(Timing):
    """Another delay model whose messages are a fraction of a whole float32 model.

    >>> from matcha.timing import Units
    >>> Wired(base=Units(), size_ratio=0.1).round_time([((0, 1),), ((1, 2),)])
    0.2
    """

    base: Timing
    size_ratio: float
    gathered: bool = False

    @property
    def is_gathered(self) -> bool:
        """Whether averages are gathered."""
        return self.gathered

    @property
    def unit(self) -> str:
        """The base model's."""
        return self.base.unit

    def matching_time(self, matching: Matching) -> float:
        """The base model's time, times the size ratio."""
        return self.size_ratio * self.base.matching_time(matching)

    def round_time(self, matchings: Sequence[Matching]) -> float:
        """The base model's time, times the size ratio."""
        return self.size_ratio * self.base.round_time(matchings)

    def to_json(self) -> dict[str, Any]:
        """The model as plain JSON values."""
        found = {
            "model": "wired",
            "size_ratio": self.size_ratio,
            "base": TIMINGS.to_json(self.base),
        }
        return found | {"gathered": True} if self.gathered else found


def timing_over(timing: Timing, wire: Wire) -> Timing:
    """A delay model of whole float32 models as it is with a wire's messages."""
    ratio = wire.size_ratio()
    if ratio == 1:
        return timing
    if isinstance(wire, TopK):
        if isinstance(timing, LinkSeconds):
            timing, ratio = replace(timing, size_ratio=ratio), 1.0
        return Wired(base=timing, size_ratio=ratio, gathered=True)
    if isinstance(timing, LinkSeconds):
        return replace(timing, size_ratio=ratio, num_phases=wire.num_phases)
    if isinstance(timing, Scaled):
        return Scaled(lambda n: ratio * timing.t(n), timing.num_matchings)
    if isinstance(timing, RandomLinks):
        rows = tuple(tuple(ratio * v for v in row) for row in timing.samples)
        return replace(timing, samples=rows)
    return Wired(base=timing, size_ratio=ratio)


def budget_over(topology: Topology, timing: Timing, wire: Wire, budget: float) -> float:
    """The share of vanilla's rounds that a budget of vanilla's time buys over a wire.

    >>> from matcha.timing import Units
    >>> from matcha.wires import Float, parse_wire
    >>> ring = Topology.from_links([(0, 1), (1, 2), (2, 0)])
    >>> budget_over(ring, Units(), Float(name="bfloat16"), 0.2)
    0.4
    """
    wired = timing_over(timing, wire)
    if wired is timing:
        return budget
    whole = sum(timing.matching_time((link,)) for link in topology.links)
    small = sum(wired.matching_time((link,)) for link in topology.links)
    # To ten digits, so that a tenth of the bytes is ten times the rounds and not almost.
    return min(1.0, float(f"{budget * whole / small:.10g}"))


def _refuse_transfers(document: dict[str, Any], topology: Topology) -> Timing:
    raise InputError(
        "its delay model 'transfers' is gone: put the times into the topology, as link_times and "
        "link_latencies, and plan again."
    )


def _read_wired(document: dict[str, Any], topology: Topology) -> Timing:
    base = TIMINGS.from_json(document["base"], topology)
    ratio = document["size_ratio"] if "size_ratio" in document else document["share"]  # by 0.2
    gathered = document.get("gathered", False) is True
    return Wired(base=base, size_ratio=float(ratio), gathered=gathered)


register_timing("wired", _read_wired)
register_timing("transfers", _refuse_transfers)
