"""Training while workers are killed, stopped and cut off at random, against the same undisturbed.

    python benchmarks/churn.py --output benchmarks/results/churn-kill
    python benchmarks/churn.py --task digits --nudges 3 --output benchmarks/results/churn-kill-cnn
    python benchmarks/churn.py --fault stop --output benchmarks/results/churn-stop
    sudo python benchmarks/churn.py --fault cut --pause 3 --output benchmarks/results/churn-cut
    sudo python benchmarks/churn.py --fault sever --output benchmarks/results/churn-sever
    sudo python benchmarks/churn.py --storm storms/eight.json --output benchmarks/results/storm

Eight real processes train digits over links of their own (TLS, a certificate each), forked from
one that has imported torch, as `matcha train --elastic` does. Every ten
seconds one of them, rank 0 too, is killed (SIGKILL) and started again after five, or stopped
(SIGSTOP) for five; or each worker is a network namespace and a wire between two of them is taken
down (`ip link set down`), for three seconds (cut) or for good (sever) as long as the rest hangs
together. A worker keeps a pace, so that seconds and iterations go together; the undisturbed run
is the same training with workers as threads, iteration by iteration. Counted are the loss of the
final average model on all training data beside that of the undisturbed run, the longest stall of a
survivor, how long a worker or a link was away, meetings left out, stalls, and whether each has an
explanation (an end or the link was away, or had just come back), and by how much the sum of the
survivors can have shifted: a meeting whose last byte was lost shifts nothing if the other end died.

A storm (`--storm FILE`, see network/storms.py) kills, stops and cuts off several at once, each
worker in a network namespace of its own: what is sent to one that is cut off is lost in silence.
Of the workers that are alive in a second, those take part that have a meeting in it. Others may
join in it, and leave for good; the undisturbed run is that of the eight. A worker that is started
again after such a change asks any living one to be let in, as one that joins does: all neighbours
that it knows may have left.

"Within 2 %" means something only where a loss has stopped falling with the steps taken: else it
measures the work that was not done, by however much more the undisturbed run would have gained from
it. So the rate runs out over the last 80 % of a run, and the model is logistic regression with
weight decay, which has one minimum: a fifth fewer iterations change the undisturbed loss by 0.03 %,
and what a disturbed run ends above it is the faults' doing. A CNN on the same digits (`--task
digits`) has many minima: a change of its initial weights in the fifth digit leads to another, some
per cent away. `--nudges 3` runs the undisturbed training so often again with such changes and tells
how far apart they end; only beyond that does a ratio say anything of faults.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import harness
import torch
from network.faults import Fault, Who, disturb, victims
from network.namespaces import Network
from network.storms import Storm
from parts.diaries import Diary, growth, judge, participation

from matcha import Plan, Topology, families, plan
from matcha._io.keys import new_keys
from matcha.distributed import Gossip, Peers, Transport
from matcha.distributed.launch.launcher import LocalWorkers, local_links
from matcha.distributed.launch.placement import (
    KEYS_VARIABLE,
    LISTEN_VARIABLE,
    LOSS_VARIABLE,
    PEERS_VARIABLE,
    default_transport,
)
from matcha.distributed.links.peers import DEFAULT_PORT
from matcha.errors import ExchangeError
from matcha.testing import run_threads
from matcha.training.task import dealt
from matcha.zoo.recipes import Choices, recipe

NUM_WORKERS = 8
LAST = 100  # iterations at the end that begin when all are there
GIGABIT = 0.008  # seconds per megabyte
NAMESPACE, JOIN = "CHURN_NAMESPACE", "CHURN_JOIN"
CLONE_NEWNET = 0x40000000
RATES = {"digits": 0.1, "logistic": 0.05}
MOMENTUM, DECAY = 0.9, 2e-2
NUDGE = 1e-5  # of the initial weights


# -- one worker ------------------------------------------------------------------------------------


def make_task(name: str) -> Any:
    task = recipe(name).task(Choices(num_workers=NUM_WORKERS))
    task.to(torch.device("cpu"), torch.float32)
    return task


def join(
    transport: Transport | None,
    chosen: Plan | None,
    task: Any,
    nudge: float = 0.0,
    choices: Mapping[str, Any] | None = None,
) -> Gossip:
    model = task.model()
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(1 + nudge)
    kinds = {"momentum": MOMENTUM, "weight_decay": DECAY}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATES[task.name], **kinds)
    return Gossip(model, optimizer, chosen, transport=transport, **(choices or {}))


def work(folder: Path, name: str, iterations: int, pace: float) -> None:
    torch.set_num_threads(1)
    chosen, task = Plan.load(folder / "plan.json"), make_task(name)
    if NAMESPACE in os.environ:
        enter(os.environ[NAMESPACE].replace("RANK", os.environ["RANK"]))
    choices = json.loads((folder / "options.json").read_text())
    if JOIN in os.environ:
        gossip = ask(os.environ[JOIN].split(","), task, choices)
    else:
        gossip = join(default_transport(chosen.topology), chosen, task, choices=choices)
    transport: Any = gossip.state.transport
    assert gossip.state.elastic is not None
    diary = Diary(folder, gossip.rank)
    gossip.state.elastic.on_meeting = diary.meeting
    diary.note("joined", iteration=gossip.iteration)
    leaves = [folder / f"leave-{gossip.rank}"]

    def note(seconds: float, iteration: int) -> None:
        diary.step(seconds, iteration)
        if iteration % LAST == 0:
            diary.held()
        if leaves and leaves[0].exists():
            leaves.clear()
            gossip.leave()

    train(gossip, task, iterations, pace, note)
    diary.note("ended", sockets=transport.num_sockets(), members=gossip.members)
    if gossip.rank in gossip.members:
        with gossip.averaged() as average:
            if gossip.rank == min(gossip.members):
                (folder / "loss").write_text(str(loss_of(average, task)))
                steps = gossip.plan.steps_before(iterations)
                (folder / "steps").write_text(str(steps))
    gossip.detach()
    transport.close()


def ask(members: Sequence[str], task: Any, choices: Mapping[str, Any]) -> Gossip:
    """Join, or come back to, a team by the first of its workers that can take this one in."""
    while True:
        for where in members:
            try:
                return join(None, None, task, choices={**choices, "join": where})
            except ExchangeError as error:  # it was lost, or cut off, at this moment
                print(f"asks another worker: {error}", flush=True)
                time.sleep(0.2)


def train(
    gossip: Gossip, task: Any, iterations: int, pace: float, note: Callable[[float, int], None]
) -> None:
    steps, tables, epoch, planned = task.steps_per_epoch, {}, -1, gossip.plan
    last = time.monotonic()
    while gossip.iteration < iterations and gossip.rank in gossip.members:
        k = gossip.iteration
        if k == iterations - LAST:
            wait_for_all(gossip)
            last = time.monotonic()
        if k // steps != epoch or gossip.plan is not planned:
            epoch, planned = k // steps, gossip.plan
            mine = dealt(task, planned)
            tables = {name: torch.from_numpy(t) for name, t in mine.tables(epoch).items()}
        inputs, targets = mine.batch({name: table[k % steps] for name, table in tables.items()})
        for group in gossip.state.optimizers[0].param_groups:
            # Down to nothing, or the last batches would decide a loss to the last per cent.
            group["lr"] = RATES[task.name] * min(1.0, (iterations - k) / (0.8 * iterations))
        loss, _ = task.loss(gossip.state.modules, inputs[gossip.rank], targets[gossip.rank], ())
        gossip.state.optimizers[0].zero_grad()
        loss.backward()
        gossip.state.optimizers[0].step()
        now = time.monotonic()
        note(now - last, gossip.iteration)
        time.sleep(max(0.0, pace - (now - last)))
        last = time.monotonic()


def wait_for_all(gossip: Gossip) -> None:
    """A slow machine may still be starting the last one again when training is nearly over."""
    end = time.monotonic() + 200
    while len(gossip.members) < gossip.num_workers and time.monotonic() < end:
        gossip.membership.tend()
        time.sleep(0.01)


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


# -- the whole -------------------------------------------------------------------------------------


def calm(chosen: Plan, options: argparse.Namespace, nudge: float = 0.0) -> float:
    """The loss of the undisturbed run."""
    iterations = int(options.seconds / options.pace)

    def body(transport: Transport) -> float:
        task = make_task(options.task)
        with join(transport, chosen, task, nudge, options.choices) as gossip:
            train(gossip, task, iterations, 0.0, lambda seconds, iteration: None)
            with gossip.averaged() as average:
                return loss_of(average, task) if transport.rank == 0 else 0.0

    torch.set_num_threads(1)
    return float(run_threads(NUM_WORKERS, body)[0])


def rough(folder: Path, options: argparse.Namespace, chosen: Plan) -> dict[str, Any]:
    """The disturbed run."""
    chosen.save(folder / "plan.json")
    most = NUM_WORKERS if options.storm is None else options.storm.num_workers(NUM_WORKERS)
    new_keys(folder / "keys", most, days=2)
    (folder / "logs").mkdir()
    iterations = int(options.seconds / options.pace)
    (folder / "options.json").write_text(json.dumps(dict(options.choices)))
    me = [sys.executable, __file__]
    command = [*me, "--worker", str(folder), options.task, str(iterations), str(options.pace)]
    if options.storm is not None:
        faults = in_a_storm(folder, options.storm, command)
        steps = int((folder / "steps").read_text())
        found = judge(folder, faults, most, killed=True, steps=steps)
        found |= participation(folder, faults, most) | growth(folder, most)
        return found | {"steps_kept": 1 - found["steps_not_taken"]}
    order = victims(options.fault, chosen, options.seed)
    if options.fault in ("cut", "sever"):
        faults = on_wires(folder, options, command, chosen.topology, order)
    else:
        faults = on_loopback(folder, options, command, order)
    killed = options.fault == "kill"
    return judge(folder, faults, NUM_WORKERS, killed=killed, steps=NUM_WORKERS * iterations)


def pinned(options: argparse.Namespace) -> dict[str, Any]:
    number = int((options.seconds - options.pause - 10) // options.period)
    return {"number": number, "period": options.period, "pause": options.pause}


def on_loopback(
    folder: Path, options: argparse.Namespace, command: Sequence[str], order: Iterator[Who]
) -> list[Fault]:
    """Workers on this machine, killed or stopped."""
    environment = local_links(NUM_WORKERS, folder, folder / "keys") | {LOSS_VARIABLE: "continue"}
    logs = folder / "logs"
    with LocalWorkers(
        command, NUM_WORKERS, environment=environment, logs=logs, forked=True
    ) as workers:
        _wait_for_start(folder, lambda: any(workers.poll()))

        def start(who: Who) -> bool:
            process = workers.processes[who[0]]
            if process.poll() is not None:
                return False
            process.send_signal(signal.SIGSTOP if options.fault == "stop" else signal.SIGKILL)
            return True

        def end(who: Who) -> None:
            if options.fault == "stop":
                workers.processes[who[0]].send_signal(signal.SIGCONT)
            else:
                workers.processes[who[0]].wait()
                workers.restart(who[0])

        faults = disturb(order, start, end, **pinned(options))
        _check(workers.wait(timeout=options.seconds + 300, grace=60), logs)
    return faults


def enter(namespace: str) -> None:
    """Go on in a network namespace; threads that are started from here on do so, too."""
    with Path("/var/run/netns", namespace).open("rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")


def in_a_storm(folder: Path, storm: Storm, command: Sequence[str]) -> list[Fault]:
    """Workers in namespaces, killed, stopped and cut off, several at once; others join or leave."""
    logs, most = folder / "logs", storm.num_workers(NUM_WORKERS)
    with Network(families.ring(most)) as network:
        addresses = [network.address(rank) for rank in range(most)]
        first = tuple((address, DEFAULT_PORT) for address in addresses[:NUM_WORKERS])
        Peers(addresses=first).save(folder / "peers")
        environment = {
            PEERS_VARIABLE: str(folder / "peers"),
            KEYS_VARIABLE: str(folder / "keys"),
            LOSS_VARIABLE: "continue",
            NAMESPACE: network.host(0).removesuffix("0") + "RANK",
        }
        with LocalWorkers(
            command, NUM_WORKERS, environment=environment, logs=logs, forked=True
        ) as workers:
            _wait_for_start(folder, lambda: any(workers.poll()))
            there, changed = set(range(NUM_WORKERS)), False

            def asking(rank: int) -> dict[str, str]:
                """What a worker needs that asks to be let in."""
                members = ",".join(f"{addresses[m]}:{DEFAULT_PORT}" for m in sorted(there))
                return {JOIN: members, LISTEN_VARIABLE: f"{addresses[rank]}:{DEFAULT_PORT}"}

            def goes(act: Callable[[int], None]) -> Callable[[int], None]:
                return lambda rank: (there.discard(rank), act(rank))[1]

            def comes(act: Callable[[int], None]) -> Callable[[int], None]:
                return lambda rank: (act(rank), there.add(rank))[1]

            def send(number: signal.Signals) -> Callable[[int], None]:
                return lambda rank: workers.processes[rank].send_signal(number)

            def again(rank: int) -> None:
                workers.processes[rank].wait()
                workers.restart(rank, asking(rank) if changed else None)

            def enter_team(rank: int) -> None:
                nonlocal changed
                changed = True
                assert workers.add(asking(rank)) == rank

            def leave_team(rank: int) -> None:
                nonlocal changed
                changed = True
                (folder / f"leave-{rank}").touch()

            faults = storm.play(
                {"kill": goes(send(signal.SIGKILL)), "stop": goes(send(signal.SIGSTOP)),
                 "cut": goes(network.isolate), "join": comes(enter_team),
                 "leave": goes(leave_team)},
                {"kill": comes(again), "stop": comes(send(signal.SIGCONT)),
                 "cut": comes(lambda rank: network.isolate(rank, mended=True))},
                NUM_WORKERS,
            )  # fmt: skip
            _check(workers.wait(timeout=300, grace=60), logs)
    return faults


def on_wires(
    folder: Path,
    options: argparse.Namespace,
    command: Sequence[str],
    topology: Topology,
    order: Iterator[Who],
) -> list[Fault]:
    """Workers in namespaces, their wires taken down."""
    logs = folder / "logs"
    wired = topology.with_link_times([GIGABIT] * len(topology.links))  # then each is a wire
    with Network(wired, message_bytes=1_000_000) as network, ExitStack() as stack:
        addresses = ((network.address(rank), DEFAULT_PORT) for rank in range(NUM_WORKERS))
        Peers(addresses=tuple(addresses)).save(folder / "peers")
        environment = {
            PEERS_VARIABLE: str(folder / "peers"),
            KEYS_VARIABLE: str(folder / "keys"),
            LOSS_VARIABLE: "continue",
        }
        processes: list[subprocess.Popen[bytes]] = []
        for rank in range(NUM_WORKERS):
            log = stack.enter_context((logs / f"worker-{rank}.log").open("wb"))
            process = network.start(rank, command, environment=environment, output=log)
            processes.append(process)
        _wait_for_start(folder, lambda: any(p.poll() for p in processes))

        def start(who: Who) -> bool:
            network.cut(who[0], who[1])
            return True

        end = None if options.fault == "sever" else lambda who: network.mend(*who)
        faults = disturb(order, start, end, **pinned(options))
        _check([process.wait(options.seconds + 300) for process in processes], logs)
    return faults


def _check(codes: Sequence[int], logs: Path) -> None:
    if any(codes):
        said = "\n".join(path.read_text()[-2000:] for path in sorted(logs.iterdir()))
        raise SystemExit(f"workers ended with {codes}:\n{said}")


def _wait_for_start(folder: Path, failed: Callable[[], bool]) -> None:
    end = time.monotonic() + 200
    while len(list(folder.glob("diary-*.jsonl"))) < NUM_WORKERS:
        if time.monotonic() > end or failed():
            raise SystemExit("the workers did not start")
        time.sleep(0.1)


def describe(result: dict[str, Any]) -> str:
    what = f"{NUM_WORKERS} workers, {result['task']}, {result['seconds']:g} s"
    lines = [f"{what}, fault: {result['fault']}; {result['machine']}", ""]
    lines += [f"{'loss undisturbed':<20}{_shown(result['undisturbed']['loss']):>26}"]
    for loss in result["undisturbed"]["nudged"]:
        lines.append(f"{'  nudged':<20}{_shown(loss):>26}")
    lines += [
        f"{name.replace('_', ' '):<20}{_shown(value):>26}"
        for name, value in result["disturbed"].items()
        if name != "processes"
    ]
    for row in result["disturbed"].get("processes", ()):
        held = ", ".join(
            f"{row[f'{what}_first']:.0f} to {row[f'{what}_last']:.0f} {what}"
            for what in ("megabytes", "handles", "threads")
        )
        lines.append(f"a process of {row['seconds']:.0f} s: {held}")
    lines.append(f"\nfinal average loss, disturbed over undisturbed: {result['loss_ratio']:.4f}")
    if (spread := result["undisturbed"]["spread"]) is not None:
        lines.append(f"undisturbed runs among themselves, highest over lowest: {spread:.4f}")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "–" if value is None else str(value)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--fault", choices=["kill", "stop", "cut", "sever", "none"], default="kill")
    parser.add_argument("--storm", type=Path, metavar="FILE", help="a storm instead of one fault")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--period", type=float, default=10.0, help="seconds between faults")
    parser.add_argument("--pause", type=float, default=5.0, help="seconds until it is undone")
    parser.add_argument("--pace", type=float, default=0.1, help="seconds per iteration")
    parser.add_argument("--undisturbed", type=float, help="its loss, as --fault none printed it")
    parser.add_argument("--task", choices=[*RATES], default="logistic")
    parser.add_argument("--nudges", type=int, default=0, help="undisturbed runs from nearby")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", nargs=4, metavar=("FOLDER", "TASK", "ITERATIONS", "PACE"))
    options = parser.parse_args()
    if options.worker:
        folder, name, iterations, pace = options.worker
        work(Path(folder), name, int(iterations), float(pace))
        return
    options.choices, wire, name = {"timeout": 60}, "float32", options.fault
    if options.storm is not None:
        name = f"storm {options.storm.stem}"
        options.storm = storm = Storm.read(harness.HERE / options.storm, NUM_WORKERS)
        options.choices, wire, options.pace = storm.options, storm.wire, storm.pace
        options.seconds = storm.seconds + LAST * options.pace
    chosen = plan(families.paper("er8"), 0.3, "greedy", wire=wire)
    if options.fault == "none":
        print(*(calm(chosen, options, NUDGE * k) for k in range(options.nudges + 1)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        disturbed = rough(Path(scratch), options, chosen)
    load = os.getloadavg()[1]  # over five minutes, of which the workers themselves make some
    print(json.dumps(disturbed), file=sys.stderr)  # whatever becomes of the other run
    undisturbed = options.undisturbed or calm(chosen, options)
    nudged = [calm(chosen, options, NUDGE * k) for k in range(1, options.nudges + 1)]
    spread = max(undisturbed, *nudged) / min(undisturbed, *nudged) if nudged else None
    result = {
        "benchmark": "churn",
        "task": options.task,
        "fault": name,
        "seconds": options.seconds,
        "machine": f"{os.cpu_count()} cores, load {load:.1f}",
        "undisturbed": {"loss": undisturbed, "nudged": nudged, "spread": spread},
        "disturbed": disturbed,
        "loss_ratio": disturbed["loss"] / undisturbed,
    }
    harness.finish(options.output, result, describe(result))


if __name__ == "__main__":
    main()
