"""Diaries: what workers saw while some of them were lost, and what that says of the faults."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from network.faults import Fault

from matcha.distributed.exchange.hooks import Outcome
from matcha.distributed.exchange.meeting import Meeting

STALL = 0.25  # seconds from which on a gap between two iterations is written down
AROUND = 2.0  # seconds around an absence in which it may hold up others: silence, and news of it


class Diary:
    """What a worker saw, a line at a time: a kill loses nothing that was written.

    Times are those of the monotonic clock, which all processes of a machine share.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / f"diary-{rank}.jsonl").open("a", buffering=1, encoding="utf-8")
        self._met: list[int] = []

    def note(self, what: str, **facts: Any) -> None:
        """Write a line."""
        self._file.write(json.dumps({"what": what, "time": time.monotonic(), **facts}) + "\n")

    def meeting(self, iteration: int, meeting: Meeting, outcome: Outcome, shift: float) -> None:
        """As `ElasticMeetings.on_meeting`."""
        if outcome == "held":
            self._met.append(meeting.peer)
        else:
            self.note(outcome, iteration=iteration, peer=meeting.peer, shift=shift)

    def held(self) -> None:
        """Memory, handles and threads of this process."""
        status = Path("/proc/self/status").read_text(encoding="ascii").split("\n")
        facts = dict(line.split(":", 1) for line in status if line)
        handles, megabytes = os.listdir("/proc/self/fd"), int(facts["VmRSS"].split()[0]) / 1024
        self.note("held", pid=os.getpid(), megabytes=megabytes, threads=int(facts["Threads"]),
                  handles=len(handles))  # fmt: skip

    def step(self, seconds: float, iteration: int) -> None:
        """An iteration is over; a long one is a stall."""
        self.note("stall" if seconds > STALL else "step", seconds=seconds, iteration=iteration,
                  met=self._met)  # fmt: skip
        self._met = []


def judge(
    folder: Path, faults: Sequence[Fault], num_workers: int, *, killed: bool, steps: int
) -> dict[str, Any]:
    """Count what happened, of so many steps that could have been taken."""
    diaries = {
        rank: [json.loads(line) for line in _lines(folder / f"diary-{rank}.jsonl")]
        for rank in range(num_workers)
    }
    absences = [(fault, _return(diaries, fault)) for fault in faults]

    def why(rank: int, peer: int, moment: float, around: float = AROUND) -> list[Fault]:
        return [
            fault
            for fault, back in absences
            if fault.start - around <= moment <= back + around and fault.concerns(rank, peer)
        ]

    def is_survivor(rank: int, moment: float) -> bool:
        return not any(len(fault.who) == 1 for fault in why(rank, rank, moment))

    def is_explained(rank: int, note: dict[str, Any]) -> bool:
        """By a fault's time; or one end, when the fault was over, had the meeting behind it."""
        return bool(why(rank, note["peer"], note["time"])) or any(
            fault.start <= note["time"]
            and note["iteration"] < _reached(diaries[note["peer"]], back + AROUND)
            for fault, back in absences
            if fault.concerns(rank, note["peer"])
        )

    every = [(rank, note) for rank, notes in diaries.items() for note in notes]
    left_out = [(rank, n) for rank, n in every if n["what"] in ("left out", "uncertain")]
    uncertain = [(rank, n) for rank, n in left_out if n["what"] == "uncertain"]
    shifts = [n["shift"] for r, n in uncertain if not (killed and why(r, n["peer"], n["time"]))]
    stalls = [(r, n) for r, n in every if n["what"] == "stall" and is_survivor(r, n["time"])]
    # What is gone for good holds others up only when it goes.
    over = [back if fault.end < float("inf") else fault.start for fault, back in absences]
    begun = [fault.end if fault.kind == "join" else fault.start for fault in faults]
    disturbed = [(b - AROUND, o + AROUND) for b, o in zip(begun, over, strict=True)]
    ends = [next(n for n in reversed(d) if n["what"] == "ended") for d in diaries.values()]
    taken = sum(n["what"] in ("step", "stall") for _, n in every)
    finite = [(f, back) for f, back in absences if f.end < float("inf")]
    returns = [back - f.start for f, back in finite if f.kind != "join"]
    return {
        "loss": float((folder / "loss").read_text()),
        "faults": len(faults),
        "returned": sum(back < float("inf") for _, back in absences),
        "mean_return": sum(returns) / len(returns) if returns else None,
        "longest_return": max(returns, default=None),
        "steps_not_taken": 1 - taken / steps,
        "stalls": len(stalls),
        "longest_stall": max((n["seconds"] for _, n in stalls), default=0.0),
        "stalls_unexplained": sum(
            not any(a <= n["time"] <= b + n["seconds"] for a, b in disturbed) for _, n in stalls
        ),
        "meetings_held": sum(len(n.get("met", ())) for _, n in every) // 2,
        "meetings_left_out": len(left_out),
        "unexplained": sum(not is_explained(r, n) for r, n in left_out),
        "last_byte_lost": len(uncertain),
        "shift_of_sum": sum(shifts),
        "members_at_end": max(len(end["members"]) for end in ends),
        "sockets": [end["sockets"] for end in ends],
    }


def participation(folder: Path, faults: Sequence[Fault], num_workers: int) -> dict[str, Any]:
    """Of the workers alive in each second of a storm, how many had a meeting in it.

    Alive is who is not away: neither killed and not started again yet, nor stopped, nor cut off.
    The first to the last fault count. Times back are from the end of an absence to a meeting.
    """
    met = {
        rank: [n["time"] for line in _lines(folder / f"diary-{rank}.jsonl")
               if (n := json.loads(line)).get("met")]
        for rank in range(num_workers)
    }  # fmt: skip
    alive = took_part = 0
    moments = [m for f in faults for m in (f.start, f.end) if m < float("inf")]
    moment, last = min(moments), max(moments)
    while moment < last:
        for rank, times in met.items():
            if not any(
                f.who == (rank,) and f.start < moment + 1 and f.end > moment for f in faults
            ):
                alive += 1
                took_part += any(moment <= each < moment + 1 for each in times)
        moment += 1
    over = [fault for fault in faults if fault.end < float("inf")]
    back = {
        fault: min((t for t in met[fault.who[0]] if t > fault.end), default=float("inf"))
        - fault.end
        for fault in over
    }
    backs = [seconds for fault, seconds in back.items() if fault.kind != "join"]
    joins = [seconds for fault, seconds in back.items() if fault.kind == "join"]
    kinds = ("kill", "stop", "cut", "join", "leave")
    return {
        "participation": took_part / alive,
        "median_time_back": statistics.median(backs),
        "longest_time_back": max(backs),
        **({"longest_time_to_join": max(joins)} if joins else {}),
        "faults_by_kind": {k: n for k in kinds if (n := sum(f.kind == k for f in faults))},
    }


def growth(folder: Path, num_workers: int) -> dict[str, Any]:
    """How memory and handles of the processes that lived longest went on after a tenth of a run."""
    found: dict[int, list[dict[str, Any]]] = {}
    for rank in range(num_workers):
        for line in _lines(folder / f"diary-{rank}.jsonl"):
            note = json.loads(line)
            if note["what"] == "held":
                found.setdefault(note["pid"], []).append(note)
    longest = sorted(found.values(), key=len)[-4:]
    rows = []
    for notes in longest:
        first, last = notes[len(notes) // 10], notes[-1]
        rows.append({
            "seconds": last["time"] - first["time"],
            **{f"{key}_{when}": n[key] for key in ("megabytes", "handles", "threads")
               for when, n in (("first", first), ("last", last))},
        })  # fmt: skip
    return {"processes": rows}


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


def _return(diaries: dict[int, list[dict[str, Any]]], fault: Fault) -> float:
    """When it took part again: a worker joined again or had a meeting, a link carried a meeting."""
    if fault.end == float("inf"):
        return fault.end
    notes = diaries[fault.who[0]]
    if len(fault.who) == 2:
        met = (
            n["time"] for n in notes if n["time"] > fault.end and fault.who[1] in n.get("met", ())
        )
        return min(met, default=float("inf"))
    joined = [n["time"] for n in notes if n["what"] == "joined" and n["time"] > fault.start]
    met = [n["time"] for n in notes if n["time"] > fault.end and n.get("met")]
    return min([*joined, *met], default=float("inf"))


def _reached(diary: Sequence[dict[str, Any]], moment: float) -> int:
    """How far a worker was at a moment."""
    return max((n["iteration"] for n in diary if n["time"] <= moment and "iteration" in n),
               default=0)  # fmt: skip
