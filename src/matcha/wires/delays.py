"""Delay models that know messages: what a wire really saves on a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from matcha.errors import InputError
from matcha.timing import (
    TIMINGS,
    Additive,
    LinkSeconds,
    RandomLinks,
    Scaled,
    Timing,
    register_timing,
)
from matcha.topology import Link, Matching, Topology
from matcha.wires.wire import Wire


@dataclass(frozen=True, kw_only=True)
class Wired(Additive):
    """Another delay model whose messages are a share of a whole float32 model.

    >>> from matcha.timing import Units
    >>> Wired(base=Units(), share=0.1).round_time([((0, 1),), ((1, 2),)])
    0.2
    """

    base: Timing
    share: float

    @property
    def unit(self) -> str:
        """The base model's."""
        return self.base.unit

    def matching_time(self, matching: Matching) -> float:
        """The share of the base model's time."""
        return self.share * self.base.matching_time(matching)

    def round_time(self, matchings: Sequence[Matching]) -> float:
        """The share of the base model's time."""
        return self.share * self.base.round_time(matchings)

    def to_json(self) -> dict[str, Any]:
        """The model as plain JSON values."""
        return {"model": "wired", "share": self.share, "base": TIMINGS.to_json(self.base)}


@dataclass(frozen=True, kw_only=True)
class Transfers(Additive):
    """Every link has a latency a message and seconds a megabyte; a matching costs its slowest link.

    For figures of your own, as of a data sheet; `matcha probe` writes measured ones into the
    topology, whose `LinkSeconds` do the same. A small message saves the megabytes and not the
    latency, so on a quick network with long ways the smallest wire is not the best one.

    >>> topology = Topology.from_links([(0, 1), (1, 2)])
    >>> slow = Transfers(
    ...     topology=topology, latencies=(0.1, 0.1), seconds_per_megabyte=(0.5, 1.0), megabytes=2.0
    ... )
    >>> slow.matching_time(((1, 2),))
    2.1
    """

    topology: Topology = field(repr=False)
    latencies: tuple[float, ...]
    """Seconds before the first byte arrives, a link each."""
    seconds_per_megabyte: tuple[float, ...]
    megabytes: float
    """Of a whole float32 model."""
    share: float = 1.0
    """What the wire leaves of them."""
    halves: int = 1
    """Messages one after another in a meeting."""
    unit: str = field(default="seconds", init=False)

    def __post_init__(self) -> None:
        number = len(self.topology.links)
        for values in (self.latencies, self.seconds_per_megabyte):
            if len(values) != number or not all(v >= 0 for v in values):
                raise InputError(f"link times are {number} seconds, one a link, from 0 up.")
        if not self.megabytes > 0:
            raise InputError(f"the model has {self.megabytes} megabytes, but it must have some.")

    @cached_property
    def _seconds(self) -> Mapping[Link, float]:
        size = self.megabytes * self.share
        pairs = zip(self.latencies, self.seconds_per_megabyte, strict=True)
        times = (self.halves * latency + size * pace for latency, pace in pairs)
        return dict(zip(self.topology.links, times, strict=True))

    def matching_time(self, matching: Matching) -> float:
        """The slowest link's seconds."""
        return max((self._seconds[link] for link in matching), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """The model as plain JSON values."""
        return {
            "model": "transfers",
            "latencies": list(self.latencies),
            "seconds_per_megabyte": list(self.seconds_per_megabyte),
            "megabytes": self.megabytes,
            "share": self.share,
            "halves": self.halves,
        }


def timing_over(timing: Timing, wire: Wire) -> Timing:
    """A delay model of whole float32 models as it is with a wire's messages."""
    share = wire.size_ratio()
    if share == 1:
        return timing
    if isinstance(timing, Transfers | LinkSeconds):
        return replace(timing, share=share, halves=wire.num_phases)
    if isinstance(timing, Scaled):
        return Scaled(lambda n: share * timing.t(n), timing.num_matchings)
    if isinstance(timing, RandomLinks):
        rows = tuple(tuple(share * v for v in row) for row in timing.samples)
        return replace(timing, samples=rows)
    return Wired(base=timing, share=share)


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


def _transfers(document: dict[str, Any], topology: Topology) -> Timing:
    name = "seconds_per_megabyte"
    paces = document[name] if name in document else document["seconds_a_megabyte"]  # as 0.2 wrote
    return Transfers(
        topology=topology,
        latencies=tuple(map(float, document["latencies"])),
        seconds_per_megabyte=tuple(map(float, paces)),
        megabytes=float(document["megabytes"]),
        share=float(document["share"]),
        halves=int(document["halves"]),
    )


def _wired(document: dict[str, Any], topology: Topology) -> Timing:
    base = TIMINGS.from_json(document["base"], topology)
    return Wired(base=base, share=float(document["share"]))


register_timing("wired", _wired)
register_timing("transfers", _transfers)
