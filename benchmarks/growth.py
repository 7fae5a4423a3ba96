"""A team that grows and shrinks while it trains: real processes over links with TLS.

    python benchmarks/growth.py --output benchmarks/results/growth

Four workers train on digits. Four more join; then five leave for good, one by one, among them the
ones that were there first. Counted are the longest time between two steps of a worker that was
there (in the whole run, and within three seconds of a change), the shift of the average model at
each change, and the loss in the end beside that of four workers that stay and compute as many
gradients. Then: ten that join at once; one that is killed while it joins; and one that comes with
the keys of another team. `--case many` lets one join sixty-four, which counts until it trains.

What a worker holds before and after a change it writes to a file, which is not part of what
a change takes.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from torch import nn

import matcha
from matcha import Plan, families
from matcha._io.keys import issue, new_keys
from matcha.distributed import Gossip, LinkTransport, read_peers
from matcha.distributed.elastic.growth import Growth
from matcha.distributed.launch.launcher import LocalWorkers, local_links
from matcha.distributed.launch.placement import JOIN_VARIABLE, KEYS_VARIABLE, default_transport
from matcha.errors import ExchangeError
from matcha.zoo.recipes import Choices, recipe

BATCH, RATE, DECAY = 16, 0.1, 1e-3
CASES = ("grow", "ten", "killed", "foreign")
PATIENCE = 420.0
NEVER = 10**9  # gradients
TIMEOUT = 5.0  # seconds of silence: twelve processes share the cores, which is no loss
OFFSET_VARIABLE = "GROWTH_OFFSET"


# -- one worker ------------------------------------------------------------------------------------


def work(folder: Path) -> None:
    """Train until all together have computed so many gradients, or until told to leave."""
    torch.set_num_threads(1)
    settings = json.loads((folder / "settings.json").read_text())
    rank = int(os.environ["RANK"]) + int(os.environ.get(OFFSET_VARIABLE, "0"))
    os.environ["RANK"] = str(rank)
    logging.basicConfig(format="%(created).3f %(message)s", level=logging.INFO)
    inputs, targets = data()
    torch.manual_seed(0)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, weight_decay=DECAY)
    watch_average(folder, rank, model)
    warm_up(model, inputs, targets)
    log = (folder / f"ticks-{rank}").open("w", buffering=1, encoding="utf-8")
    log.write(f"{time.monotonic()} -1\n")
    transport = None
    chosen = None
    if JOIN_VARIABLE not in os.environ:
        chosen = Plan.load(folder / "plan.json")
        transport = default_transport(chosen.topology)
        assert isinstance(transport, LinkTransport)
        transport.patience = TIMEOUT
    gossip = Gossip(
        model,
        optimizer,
        chosen,
        transport=transport,
        timeout=60,
        on_loss="continue",
    )
    shard = gossip.shard(inputs, BATCH)
    total, end = settings["gradients"], time.monotonic() + PATIENCE
    while gossip.rank in gossip.members and gossip.plan.steps_before(gossip.iteration) < total:
        for chosen_rows in shard:
            optimizer.zero_grad()
            logits = model(inputs[chosen_rows])
            nn.functional.cross_entropy(logits, targets[chosen_rows]).backward()
            time.sleep(settings["pause"])  # a gradient of a larger model, on a device of its own
            optimizer.step()
            log.write(f"{time.monotonic()} {gossip.iteration}\n")
            if (folder / f"leave-{rank}").exists():
                gossip.leave()
            done = gossip.plan.steps_before(gossip.iteration) >= total
            if gossip.rank not in gossip.members or done or time.monotonic() > end:
                break
        if time.monotonic() > end or (folder / "stop").exists():
            break
    if gossip.rank in gossip.members and settings["final"]:
        torch.save(gossip.averaged_state_dict(), folder / f"model-{rank}.pt")
    (folder / f"plan-{rank}.json").write_text(json.dumps(gossip.plan.to_json()))
    gossip.detach()
    os._exit(0)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    task: Any = recipe("digits").task(Choices(num_workers=1))
    task.to(torch.device("cpu"), torch.float32)
    batches = []
    tables = {name: torch.from_numpy(t) for name, t in task.tables(0).items()}
    for k in range(task.steps_per_epoch):
        x, y = task.batch({name: table[k] for name, table in tables.items()})
        batches.append((x[0].flatten(1), y[0]))
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def warm_up(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """What torch does at its first gradient and step, so that none waits for it later."""
    other = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    nn.functional.cross_entropy(other(inputs[:BATCH]), targets[:BATCH]).backward()
    optimizer.step()


def watch_average(folder: Path, rank: int, model: nn.Module) -> None:
    """Write what this worker holds just before and just after each change."""
    change, hold = Growth._change, Growth.hold

    def flat() -> Any:
        return torch.cat([p.detach().double().flatten() for p in model.parameters()]).numpy()

    def noted(self: Growth, number: int, due: int, iteration: int) -> None:
        np.save(folder / f"before-{iteration}-{rank}.npy", flat())
        change(self, number, due, iteration)
        if not self.has_left:
            np.save(folder / f"after-{iteration}-{rank}.npy", flat())

    def held(self: Growth, workers: frozenset[int]) -> None:
        if self._position == 0:  # it has just been taken in
            np.save(folder / f"after-{self._state.iteration}-{rank}.npy", flat())
        hold(self, workers)

    Growth._change, Growth.hold = noted, held  # type: ignore[method-assign]


# -- a team ----------------------------------------------------------------------------------------


class _Team:
    """Processes that train in a folder."""

    def __init__(self, workers: int, gradients: int, *, pause: float = 0.004, final: bool = True):
        self.scratch = tempfile.TemporaryDirectory()
        self.folder = Path(self.scratch.name)
        settings = {"gradients": gradients, "pause": pause, "final": final}
        (self.folder / "settings.json").write_text(json.dumps(settings))
        topology = families.ring(workers) if workers < 64 else families.erdos_renyi(64, 0.1, seed=1)
        plan = matcha.plan(topology, 0.5, "greedy")
        plan.save(self.folder / "plan.json")
        self.keys = self.folder / "keys"
        new_keys(self.keys, workers, days=2)
        environment = {"OMP_NUM_THREADS": "1", **local_links(workers, self.folder, self.keys)}
        address = read_peers(self.folder / "peers").addresses[1]
        assert address is not None
        self.where = f"{address[0]}:{address[1]}"
        self.number = workers
        self.groups = [self._start(workers, environment, "first")]

    def _start(self, number: int, environment: Mapping[str, str], name: str) -> LocalWorkers:
        command = [sys.executable, __file__, "--worker", str(self.folder)]
        logs = self.folder / f"logs-{name}"
        return LocalWorkers(command, number, environment=environment, logs=logs, forked=True)

    def join(self, number: int, keys: Path | None = None) -> float:
        """Start so many that join."""
        for rank in range(self.number, self.number + number):
            if keys is None:
                issue(self.keys, rank, days=2)
        environment = {
            "OMP_NUM_THREADS": "1",
            JOIN_VARIABLE: self.where,
            KEYS_VARIABLE: str(keys or self.keys),
            OFFSET_VARIABLE: str(self.number),
        }
        self.groups.append(self._start(number, environment, f"join-{self.number}"))
        self.number += number
        return time.monotonic()

    def ticks(self, rank: int) -> list[tuple[float, int]]:
        path = self.folder / f"ticks-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        rows = [line.split() for line in lines]
        return [(float(row[0]), int(row[1])) for row in rows if len(row) == 2]

    def wait_for(self, what: Callable[[], bool], seconds: float = PATIENCE) -> None:
        end = time.monotonic() + seconds
        while not what():
            if time.monotonic() > end:
                raise SystemExit(f"it did not come to pass; logs in {self.folder}")
            time.sleep(0.05)

    def steps(self, rank: int) -> int:
        return sum(k >= 0 for _, k in self.ticks(rank))

    def has_ended(self, rank: int) -> bool:
        return (self.folder / f"plan-{rank}.json").exists()

    def wait(self) -> None:
        """Wait until all have ended."""
        self.wait_for(lambda: all(group.ended for group in self.groups))

    def stop(self) -> None:
        (self.folder / "stop").touch()
        self.wait()

    def close(self) -> None:
        for group in self.groups:
            group.stop()
        self.scratch.cleanup()

    def log(self) -> list[tuple[float, str]]:
        """What the workers said, with the time on the wall."""
        found = []
        for path in sorted(self.folder.glob("logs-*/worker-*.log")):
            for line in path.read_text(errors="replace").splitlines():
                if re.match(r"\d+\.\d+ ", line):
                    at, _, text = line.partition(" ")
                    found.append((float(at), text))
        return sorted(found)

    def stall(self, ranks: list[int], span: tuple[float, float] = (0.0, float("inf"))) -> float:
        """The longest time between two steps of a worker, from its tenth on, within a span."""
        longest, (start, end) = 0.0, span
        for rank in ranks:
            times = [at for at, k in self.ticks(rank) if k >= 0][10:]
            gaps = (b - a for a, b in itertools.pairwise(times) if b > start and a < end)
            longest = max([longest, *gaps])
        return longest

    def loss(self, rank: int) -> float:
        """Of the average model, on all training data, with the penalty that was trained."""
        inputs, targets = data()
        model = nn.Linear(64, 10)
        model.load_state_dict(torch.load(self.folder / f"model-{rank}.pt", weights_only=True))
        with torch.no_grad():
            penalty = 0.5 * DECAY * sum(float(p.square().sum()) for p in model.parameters())
            return float(nn.functional.cross_entropy(model(inputs), targets)) + penalty

    def changes(self) -> list[dict[str, Any]]:
        """The changes that came about: who was there before and after, and the average's shift."""
        found = []
        iterations = sorted({int(p.name.split("-")[1]) for p in self.folder.glob("before-*.npy")})
        for iteration in iterations:
            before, after = (self._held(word, iteration) for word in ("before", "after"))
            old, new = (np.mean(list(held.values()), axis=0) for held in (before, after))
            shift = float(np.linalg.norm(new - old) / np.linalg.norm(old))
            row = {"iteration": iteration, "before": len(before), "after": len(after)}
            found.append({**row, "shift": shift})
        return found

    def _held(self, word: str, iteration: int) -> dict[int, Any]:
        paths = self.folder.glob(f"{word}-{iteration}-*.npy")
        return {int(path.stem.split("-")[2]): np.load(path) for path in paths}


# -- what is measured ------------------------------------------------------------------------------


def grow(gradients: int) -> dict[str, Any]:
    """Four, then eight, then three; and four that stay."""
    found = _grow(gradients, 4, 4, (0, 5, 1, 6, 2), steps=100)
    fixed = _Team(4, gradients)
    try:
        fixed.wait()
        found["loss_of_four"], found["longest_of_four"] = fixed.loss(0), fixed.stall([0, 1, 2, 3])
    finally:
        fixed.close()
    return found


def small() -> dict[str, Any]:
    """Three, then four, then three, however long that takes: for a test."""
    return _grow(NEVER, 3, 1, (0,), steps=20)


def _grow(
    gradients: int, first: int, more: int, leaving: tuple[int, ...], *, steps: int
) -> dict[str, Any]:
    team = _Team(first, gradients, final=gradients < NEVER)
    try:
        team.wait_for(lambda: team.steps(0) > steps)
        started = time.monotonic()
        team.join(more)
        team.wait_for(lambda: all(team.ticks(rank) for rank in range(first, team.number)))
        asked = max(team.ticks(rank)[0][0] for rank in range(first, team.number))
        team.wait_for(lambda: all(team.steps(rank) > steps for rank in range(team.number)))
        for rank in leaving:
            (team.folder / f"leave-{rank}").touch()
            team.wait_for(lambda rank=rank: team.has_ended(rank))  # type: ignore[misc]
        if gradients < NEVER:
            team.wait()
        else:
            team.stop()
        stayed = sorted({*range(team.number)} - {*leaving})
        return {
            "changes": team.changes(),
            "longest_stall": team.stall(list(range(team.number))),
            "longest_while_they_start": team.stall(list(range(first)), (started, asked)),
            "loss": team.loss(stayed[0]) if gradients < NEVER else None,
            "slowest_change": max(_seconds_of_changes(team)),
        }
    finally:
        team.close()


def ten() -> dict[str, Any]:
    team = _Team(4, NEVER, final=False)
    try:
        team.wait_for(lambda: team.steps(0) > 100)
        team.join(10)
        team.wait_for(lambda: all(team.steps(rank) > 20 for rank in range(14)))
        waits = [_first_step(team, rank) for rank in range(4, 14)]
        team.stop()
        changes = team.changes()
        return {
            "changes": changes,
            "longest_stall": team.stall(list(range(4))),
            "median_wait": float(np.median(waits)),
            "longest_wait": max(waits),
        }
    finally:
        team.close()


def killed() -> dict[str, Any]:
    """One is killed as it asks, one as it is taken in, one a moment after: twice each."""
    team, rows = _Team(4, NEVER, final=False), []
    try:
        team.wait_for(lambda: team.steps(0) > 100)
        for pause in (0.0, 0.15, 0.3, 0.5, 0.8, 1.2):
            rank = team.number
            team.join(1)
            team.wait_for(lambda rank=rank: bool(team.ticks(rank)))  # type: ignore[misc]
            time.sleep(pause)
            os.kill(team.groups[-1].processes[0].pid, signal.SIGKILL)
            before = min(team.steps(worker) for worker in range(4))
            time.sleep(5.0)
            gained = min(team.steps(worker) for worker in range(4)) - before
            rows.append({"after": pause, "steps_then": gained})
        rank = team.number
        team.join(1)
        team.wait_for(lambda: team.steps(rank) > 20)
        team.stop()
        return {"rows": rows, "longest_stall": team.stall(list(range(4)))}
    finally:
        team.close()


def foreign() -> dict[str, Any]:
    """A worker of another team, with keys of its own authority, asks to be taken in."""
    team, other = _Team(4, NEVER, final=False), Path(tempfile.mkdtemp())
    try:
        team.wait_for(lambda: team.steps(0) > 100)
        new_keys(other / "keys", 5, days=2)
        team.join(1, keys=other / "keys")
        team.wait_for(lambda: team.groups[-1].ended)
        before = team.steps(0)
        team.wait_for(lambda: team.steps(0) > before + 50)
        said = (team.folder / "logs-join-4" / "worker-0.log").read_text().splitlines()[-1]
        team.stop()
        return {"said": said, "longest_stall": team.stall(list(range(4)))}
    finally:
        team.close()


def many() -> dict[str, Any]:
    """Sixty-four train, and another joins: twice."""
    team, waits = _Team(64, NEVER, pause=0.5, final=False), []
    try:
        team.wait_for(lambda: all(team.steps(rank) > 12 for rank in range(64)))
        for _ in range(3):
            rank = team.number
            team.join(1)
            team.wait_for(lambda rank=rank: team.steps(rank) > 2)  # type: ignore[misc]
            waits.append(_first_step(team, rank))
        team.stop()
        stall = team.stall(list(range(64)))
        return {"waits": waits, "longest_stall": stall, "in_plan": _waits_for_plan(team)}
    finally:
        team.close()


def _first_step(team: _Team, rank: int) -> float:
    """Seconds from when a worker was ready to ask until its first step was over."""
    ticks = team.ticks(rank)
    return next(at for at, k in ticks if k >= 0) - ticks[0][0]


def _waits_for_plan(team: _Team) -> list[float]:
    """Seconds from each request until the first worker had changed."""
    said = team.log()
    asked = [at for at, text in said if text.endswith("wants to join")]
    changed = [at for at, text in said if " joined, " in text]
    return [min(at for at in changed if at > start) - start for start in asked]


def _seconds_of_changes(team: _Team) -> list[float]:
    found = (re.search(r"are in the plan \(([0-9.]+) s\)", text) for _, text in team.log())
    return [float(match[1]) for match in found if match]


def describe(document: dict[str, Any]) -> str:
    parts = []
    if "grow" in document:
        d = document["grow"]
        columns = [
            harness.Column("iteration", "iteration", "d"),
            harness.Column("workers before", "before", "d"),
            harness.Column("after", "after", "d"),
            harness.Column("shift of the average", "shift", ".1e"),
        ]
        ratio = d["loss"] / d["loss_of_four"]
        parts.append(
            "4 workers, then 8, then 3; shift relative to the norm of the average model\n"
            + harness.table(columns, d["changes"])
            + f"\nlongest time between two steps of a worker: {d['longest_stall']:.2f} s "
            f"(four that stay: {d['longest_of_four']:.2f} s;\n"
            f"while the processes of those that join import and have not asked yet: "
            f"{d['longest_while_they_start']:.2f} s)\n"
            f"longest change for a worker: {d['slowest_change']:.2f} s\n"
            f"loss in the end: {d['loss']:.4f}, four that stay {d['loss_of_four']:.4f} "
            f"({ratio:.4f} of it), with as many gradients"
        )
    if "ten" in document:
        d = document["ten"]
        sizes = " -> ".join(map(str, [4, *(row["after"] for row in d["changes"])]))
        parts.append(
            f"ten join at once: {sizes} workers; from asking to the first step "
            f"{d['median_wait']:.1f} s (median), {d['longest_wait']:.1f} s (longest);\n"
            f"longest time between two steps of the four: {d['longest_stall']:.2f} s; "
            f"shift of the average {max(row['shift'] for row in d['changes']):.1e}"
        )
    if "killed" in document:
        d = document["killed"]
        parts.append(
            f"six are killed while they join: the others go on, longest time between two steps "
            f"{d['longest_stall']:.2f} s; the next one is taken in"
        )
    if "foreign" in document:
        d = document["foreign"]
        parts.append(
            f"one with another team's keys: refused; longest time between two steps "
            f"{d['longest_stall']:.2f} s"
        )
    if "many" in document:
        d = document["many"]
        plan = ", ".join(f"{wait:.1f}" for wait in d["in_plan"])
        waits = ", ".join(f"{wait:.1f}" for wait in d["waits"])
        parts.append(
            f"64 workers: in the plan {plan} s after it asked, first step after {waits} s; "
            f"longest time between two steps of the others: {d['longest_stall']:.2f} s"
        )
    return "\n\n".join(parts)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--worker", type=Path)
    parser.add_argument("--case", choices=(*CASES, "many", "small"), action="append")
    parser.add_argument("--gradients", type=int, default=20_000)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        try:
            work(arguments.worker)
        except ExchangeError as error:
            raise SystemExit(f"refused: {error}") from None
        return
    document = harness.earlier(arguments.output) or {}
    for case in arguments.case or CASES:
        how = {"small": small, "ten": ten, "killed": killed, "foreign": foreign, "many": many}
        document[case] = grow(arguments.gradients) if case == "grow" else how[case]()
        document["machine"] = harness.machine()
        harness.finish(arguments.output, document, describe(document))


if __name__ == "__main__":
    main()
