"""Storms: which worker is killed, stopped or cut off from all others, and when.

A file says it event by event, `{"seconds": 60, "events": [{"at": 9.1, "kill": 0, "for": 5}, ...]}`,
or how often, `{"seconds": 360, "seed": 2, "kill": {"every": 60, "for": [5, 5]}, ...}`: the mean
seconds between two of a kind in the whole team (a Poisson process), and the least and most that one
lasts. A worker that is away already is left alone, and so is the last one that is not.
"""

from __future__ import annotations

import heapq
import json
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from network.faults import Fault

KINDS = ("kill", "stop", "cut")
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
            kind = next(kind for kind in KINDS if kind in event)
            own = Event(at=event["at"], worker=event[kind], kind=kind, lasts=event["for"])
            events.append(own)
        for kind in KINDS if "events" not in said else ():
            how = said.get(kind)
            at = rng.expovariate(1 / how["every"]) if how else seconds
            while at < seconds:
                worker, lasts = rng.randrange(num_workers), rng.uniform(*how["for"])
                events.append(Event(at=at, worker=worker, kind=kind, lasts=lasts))
                at += rng.expovariate(1 / how["every"])
        named = {key: said[key] for key in ("pace", "wire", "options") if key in said}
        return cls(seconds=seconds, events=tuple(sorted(events)), **named)

    def play(
        self, begin: Mapping[str, Act], end: Mapping[str, Act], num_workers: int
    ) -> list[Fault]:
        """Let it happen, all absences over when the storm is; what was done."""
        started, faults = time.monotonic(), []
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
            if event.worker in away or len(away) >= num_workers - 1:
                continue
            away[event.worker] = time.monotonic()
            begin[event.kind](event.worker)
            over = min(event.at + event.lasts, self.seconds)
            heapq.heappush(due, (over, event.worker, event.kind))
        time.sleep(max(0.0, started + self.seconds - time.monotonic()))
        return sorted(faults, key=lambda fault: fault.start)
