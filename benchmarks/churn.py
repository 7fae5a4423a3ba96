"""Training while workers are killed, stopped and cut off at random, against the same undisturbed.

    python benchmarks/churn.py --output benchmarks/results/churn-kill
    python benchmarks/churn.py --fault stop --output benchmarks/results/churn-stop

Eight real processes train digits over links of their own (TLS, a certificate each). Every ten
seconds one of them, rank 0 too, is killed (SIGKILL) and started again after five, or stopped
(SIGSTOP) for five. A worker keeps a pace, so that seconds and iterations go together. Counted are
the loss of the final average model on all training data beside that of the undisturbed run, the
longest stall of a survivor, how long a worker was away, meetings left out and whether each has an
explanation (one of its ends was away, or had just come back), and by how much the sum of the
survivors can have shifted: a meeting whose last byte was lost shifts nothing if the other end died.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from matcha import Plan, families, plan
from matcha.distributed import Gossip
from matcha.distributed.environment import LOSS_VARIABLE, default_transport
from matcha.distributed.exchange import Meeting
from matcha.distributed.keys import new_keys
from matcha.distributed.launch import local_links
from matcha.distributed.local_workers import LocalWorkers
from matcha.distributed.meetings import Outcome
from matcha.tasks.recipes import Choices, recipe

NUM_WORKERS = 8
STALL = 0.25  # seconds from which on a gap between two iterations is written down
AROUND = 1.5  # seconds around an absence in which a meeting may be left out because of it
RATE, MOMENTUM, DECAY = 0.05, 0.9, 2e-2


# -- one worker ------------------------------------------------------------------------------------


class Diary:
    """What a worker saw, a line at a time: a kill loses nothing that was written."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / f"diary-{rank}.jsonl").open("a", buffering=1, encoding="utf-8")

    def note(self, what: str, **facts: Any) -> None:
        """Write a line."""
        self._file.write(json.dumps({"what": what, "time": time.time(), **facts}) + "\n")


def work(folder: Path, iterations: int, pace: float) -> None:
    torch.set_num_threads(1)
    chosen = Plan.load(folder / "plan.json")
    task = recipe("digits").task(Choices(num_workers=NUM_WORKERS))
    task.to(torch.device("cpu"), torch.float32)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)
    transport = default_transport(chosen.topology)
    rank = transport.rank
    diary = Diary(folder, rank)
    gossip = Gossip(model, optimizer, chosen, transport=transport, deadline=60)
    assert gossip.meetings is not None

    def note(iteration: int, meeting: Meeting, outcome: Outcome, shift: float) -> None:
        if outcome != "held":
            diary.note(outcome, iteration=iteration, peer=meeting.peer, shift=shift)

    gossip.meetings.on_meeting = note
    diary.note("joined", iteration=gossip.iteration)
    train(gossip, task, diary, iterations, pace)
    diary.note(
        "ended",
        held=gossip.meetings.held,
        sockets=transport.num_sockets(),  # type: ignore[attr-defined]
        members=gossip.members,
    )
    average = gossip.averaged_model()
    if rank == min(gossip.members):
        (folder / "loss").write_text(str(loss_of(average, task)))
    gossip.detach()
    transport.close()


def train(gossip: Gossip, task: Any, diary: Diary, iterations: int, pace: float) -> None:
    steps, tables, epoch = task.steps_per_epoch, {}, -1
    last = time.time()
    while gossip.iteration < iterations:
        k = gossip.iteration
        if k // steps != epoch:
            epoch = k // steps
            tables = {name: torch.from_numpy(t) for name, t in task.tables(epoch).items()}
        inputs, targets = task.batch({name: table[k % steps] for name, table in tables.items()})
        for group in gossip.optimizer.param_groups:
            group["lr"] = RATE * (1.0 if k < 0.6 * iterations else 0.2)
        loss, _ = task.loss(gossip.model, inputs[gossip.rank], targets[gossip.rank], ())
        gossip.optimizer.zero_grad()
        loss.backward()
        gossip.optimizer.step()
        now = time.time()
        if now - last > STALL:
            diary.note("stall", seconds=now - last, iteration=gossip.iteration)
        time.sleep(max(0.0, pace - (now - last)))
        last = time.time()


def loss_of(model: torch.nn.Module, task: Any) -> float:
    """On every worker's training data, in the order of one epoch."""
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        tables = {name: torch.from_numpy(t) for name, t in task.tables(0).items()}
        for k in range(task.steps_per_epoch):
            inputs, targets = task.batch({name: table[k] for name, table in tables.items()})
            for x, y in zip(inputs, targets, strict=True):
                total += float(task.loss(model, x, y, ())[0])
                count += 1
    return total / count


# -- faults ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One worker was away."""

    worker: int
    start: float
    end: float
    """When it was started again, or went on."""


def disturb(
    workers: LocalWorkers, fault: str, seconds: float, period: float, pause: float, seed: int
) -> list[Fault]:
    """Kill or stop a worker every `period` seconds; returns what was done."""
    rng = random.Random(seed)
    order = [0] + [rng.randrange(NUM_WORKERS) for _ in range(1000)]
    begin, faults = time.time(), []
    for number in range(int((seconds - pause - 10) // period)):
        _sleep_until(begin + number * period)
        victim = order[number]
        process = workers.processes[victim]
        if process.poll() is not None:
            continue
        start = time.time()
        process.send_signal(signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
        _sleep_until(start + pause)
        end = time.time()
        if fault == "stop":
            process.send_signal(signal.SIGCONT)
        else:
            workers.restart(victim)
        faults.append(Fault(worker=victim, start=start, end=end))
    return faults


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.time()))


# -- the whole -------------------------------------------------------------------------------------


def run(
    folder: Path, options: argparse.Namespace, chosen: Plan, fault: str | None
) -> dict[str, Any]:
    """One run, disturbed or not."""
    folder.mkdir()
    chosen.save(folder / "plan.json")
    keys = folder / "keys"
    new_keys(keys, NUM_WORKERS, days=2)
    environment = local_links(NUM_WORKERS, folder, keys) | {LOSS_VARIABLE: "continue"}
    iterations = int(options.seconds / options.pace)
    pace = options.pace if fault else 0.0
    command = [sys.executable, __file__, "--worker", str(folder), str(iterations), str(pace)]
    with LocalWorkers(command, NUM_WORKERS, environment=environment, logs=folder / "logs") as ws:
        _wait_for_start(folder, ws)
        faults = []
        if fault:
            faults = disturb(
                ws, fault, options.seconds, options.period, options.pause, options.seed
            )
        codes = ws.wait(timeout=options.seconds + 300, grace=60)
    if any(codes):
        logs = "\n".join(p.read_text()[-2000:] for p in sorted((folder / "logs").iterdir()))
        raise SystemExit(f"workers ended with {codes}:\n{logs}")
    return judge(folder, faults, killed=fault == "kill")


def _wait_for_start(folder: Path, workers: LocalWorkers) -> None:
    end = time.monotonic() + 200
    while len(list(folder.glob("diary-*.jsonl"))) < NUM_WORKERS:
        if time.monotonic() > end or any(workers.tend()):
            raise SystemExit("the workers did not start")
        time.sleep(0.1)


def judge(folder: Path, faults: list[Fault], *, killed: bool) -> dict[str, Any]:
    """Count what happened."""
    diaries = {
        rank: [json.loads(line) for line in _lines(folder / f"diary-{rank}.jsonl")]
        for rank in range(NUM_WORKERS)
    }
    absences = [(f, _return(diaries[f.worker], f)) for f in faults]
    away = [(f.worker, f.start - AROUND, back + AROUND) for f, back in absences]

    def is_away(rank: int, moment: float) -> bool:
        return any(worker == rank and a <= moment <= b for worker, a, b in away)

    every = [(rank, note) for rank, notes in diaries.items() for note in notes]
    left_out = [(rank, n) for rank, n in every if n["what"] in ("left out", "uncertain")]
    uncertain = [(rank, n) for rank, n in left_out if n["what"] == "uncertain"]
    unexplained = [
        (rank, note)
        for rank, note in left_out
        if not is_away(rank, note["time"]) and not is_away(note["peer"], note["time"])
    ]
    shifts = [n["shift"] for _, n in uncertain if not (killed and is_away(n["peer"], n["time"]))]
    stalls = [
        note["seconds"]
        for rank, note in every
        if note["what"] == "stall" and not is_away(rank, note["time"])
    ]
    ends = [next(n for n in reversed(d) if n["what"] == "ended") for d in diaries.values()]
    returns = [back - f.start for f, back in absences]
    return {
        "loss": float((folder / "loss").read_text()),
        "faults": len(faults),
        "returned": sum(back < float("inf") for _, back in absences),
        "longest_stall": max(stalls, default=0.0),
        "mean_return": sum(returns) / len(returns) if returns else None,
        "longest_return": max(returns, default=None),
        "meetings_held": sum(end["held"] for end in ends),
        "meetings_left_out": len(left_out),
        "unexplained": len(unexplained),
        "last_byte_lost": len(uncertain),
        "shift_of_sum": sum(shifts),
        "members_at_end": len(ends[0]["members"]),
        "sockets": [end["sockets"] for end in ends],
    }


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


def _return(notes: list[dict[str, Any]], fault: Fault) -> float:
    """When a worker took part again: it joined anew, or (stopped) went on with its steps."""
    joined = [n["time"] for n in notes if n["what"] == "joined" and n["time"] > fault.start]
    stalled = [n["time"] for n in notes if n["what"] == "stall" and n["time"] > fault.end]
    return min([*joined, *stalled], default=float("inf"))


def table(result: dict[str, Any]) -> str:
    calm, rough = result["undisturbed"], result["disturbed"]
    lines = [f"{NUM_WORKERS} workers, {result['seconds']:g} s, fault: {result['fault']}", ""]
    lines += [
        f"{name.replace('_', ' '):<20}{_shown(calm[name]):>26}{_shown(rough[name]):>26}"
        for name in calm
    ]
    lines.append(f"\nfinal average loss, disturbed over undisturbed: {result['loss_ratio']:.4f}")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "–" if value is None else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", choices=["kill", "stop"], default="kill")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--period", type=float, default=10.0, help="seconds between faults")
    parser.add_argument("--pause", type=float, default=5.0, help="seconds until a worker is back")
    parser.add_argument("--pace", type=float, default=0.1, help="seconds an iteration")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write OUTPUT.json and OUTPUT.txt")
    parser.add_argument("--worker", nargs=3, metavar=("FOLDER", "ITERATIONS", "PACE"))
    options = parser.parse_args()
    if options.worker:
        folder, iterations, pace = options.worker
        work(Path(folder), int(iterations), float(pace))
        return
    chosen = plan(families.paper("er8"), 0.3, "greedy")
    with tempfile.TemporaryDirectory() as scratch:
        calm = run(Path(scratch) / "undisturbed", options, chosen, None)
        rough = run(Path(scratch) / "disturbed", options, chosen, options.fault)
    result = {
        "benchmark": "churn",
        "fault": options.fault,
        "seconds": options.seconds,
        "machine": f"{os.cpu_count()} cores",
        "undisturbed": calm,
        "disturbed": rough,
        "loss_ratio": rough["loss"] / calm["loss"],
    }
    text = table(result)
    print(text)
    if options.output:
        options.output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        options.output.with_suffix(".txt").write_text(text + "\n")


if __name__ == "__main__":
    main()
