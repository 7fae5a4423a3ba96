"""Storms: which worker is killed, stopped, cut off from all others, joins or leaves, and when.

A file says it event by event, `{"seconds": 60, "events": [{"at": 9.1, "kill": 0, "for": 5},
{"at": 20, "join": 8}, {"at": 30, "leave": 3}]}`, or how often, `{"seconds": 360, "seed": 2, "kill":
{"every": 60, "for": [5, 5]}, "join": {"every": 90}, ...}`: the mean seconds between two of a kind
in the whole team (a Poisson process), and the least and most that one lasts. Those that join get
the next numbers. A worker that is away already is left alone, and so is the last one that is not.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from network.faults import Fault

KINDS = ("kill", "stop", "cut")
FOR_GOOD = ("join", "leave")
Act = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Event:
    """One worker is away for a time."""

    at: float
    """Seconds after the storm begins."""
    worker: int
    kind: str
    lasts: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Storm:
    """What a file says."""

    seconds: float
    events: tuple[Event, ...]
    pace: float = 0.1
    """Seconds per iteration."""
    wire: str = "float32"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of Gossip."""

    @classmethod
    def read(cls, path: Path, num_workers: int) -> Storm:
        """Read a file; what it leaves to chance is drawn from its seed."""
        said = json.loads(path.read_text(encoding="utf-8"))
        rng, seconds = random.Random(said.get("seed", 0)), said["seconds"]
        events = []
        for event in said.get("events", ()):
            kind = next(kind for kind in (*KINDS, *FOR_GOOD) if kind in event)
            lasts = event["for"] if kind in KINDS else math.inf
            events.append(Event(at=event["at"], worker=event[kind], kind=kind, lasts=lasts))
        numbers = itertools.count(num_workers)
        for kind in (*KINDS, *FOR_GOOD) if "events" not in said else ():
            how = said.get(kind)
            at = rng.expovariate(1 / how["every"]) if how else seconds
            while at < seconds:
                worker = next(numbers) if kind == "join" else rng.randrange(num_workers)
                lasts = rng.uniform(*how["for"]) if kind in KINDS else math.inf
                events.append(Event(at=at, worker=worker, kind=kind, lasts=lasts))
                at += rng.expovariate(1 / how["every"])
        named = {key: said[key] for key in ("pace", "wire", "options") if key in said}
        return cls(seconds=seconds, events=tuple(sorted(events)), **named)

    def num_workers(self, at_first: int) -> int:
        """How many numbers workers have in the end."""
        return max([at_first, *(event.worker + 1 for event in self.events)])

    def play(
        self, begin: Mapping[str, Act], end: Mapping[str, Act], num_workers: int
    ) -> list[Fault]:
        """Let it happen, all absences over when the storm is; what was done.

        One that joins was away until then, and one that leaves is from then on.
        """
        started, faults = time.monotonic(), []
        there = set(range(num_workers))
        away: dict[int, float] = {}
        due: list[tuple[float, int, str]] = []  # absences to be ended
        coming = list(self.events)
        while coming or due:
            is_end = bool(due) and (not coming or due[0][0] <= coming[0].at)
            at = due[0][0] if is_end else coming[0].at
            time.sleep(max(0.0, started + at - time.monotonic()))
            if is_end:
                _, worker, kind = heapq.heappop(due)
                now = time.monotonic()
                end[kind](worker)
                faults.append(Fault(who=(worker,), start=away.pop(worker), end=now, kind=kind))
                continue
            event = coming.pop(0)
            joins = event.kind == "join"
            if joins == (event.worker in there) or event.worker in away:
                continue
            if not joins and len(away) >= len(there) - 1:
                continue
            if event.kind in FOR_GOOD:
                now = time.monotonic()
                begin[event.kind](event.worker)
                there ^= {event.worker}
                start, over = (started, now) if joins else (now, math.inf)
                faults.append(Fault(who=(event.worker,), start=start, end=over, kind=event.kind))
                continue
            away[event.worker] = time.monotonic()
            begin[event.kind](event.worker)
            over = min(event.at + event.lasts, self.seconds)
            heapq.heappush(due, (over, event.worker, event.kind))
        time.sleep(max(0.0, started + self.seconds - time.monotonic()))
        return sorted(faults, key=lambda fault: fault.start)
