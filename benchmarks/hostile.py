"""One of eight workers sends garbage on purpose: what honest workers learn, clipped and not.

    python benchmarks/hostile.py --output benchmarks/results/hostile

Digits on er8, greedy at budget 0.3. The hostile worker takes part in every meeting, and its
messages hold noise a hundred times as large as a weight, its own model with the sign flipped, or a
thousand in every place; it claims to have gone a long way. Honest workers clip what a meeting does
to them (`clip=1`) or not. In the simulator, and by real processes over gloo. Accuracy is the mean
over honest workers, each with its own model, on held-out data.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import torch

import matcha
from matcha.distributed.launch.launcher import launch
from matcha.distributed.launch.placement import worker_transport
from matcha.distributed.train import Training
from matcha.distributed.transports.base import Message, Transport
from matcha.distributed.transports.collectives import gather
from matcha.simulation import Simulation
from matcha.strategies import Greedy
from matcha.training.optimizers import SGD
from matcha.training.rates import Constant
from matcha.training.settings import Settings
from matcha.zoo.recipes import Choices, recipe

WORKERS, HOSTILE, CLIP = 8, 5, 1.0
ATTACKS = ("none", "noise", "flipped", "constant")
HONEST = [worker for worker in range(WORKERS) if worker != HOSTILE]
_GREETING = 64  # bytes: what is longer is a model


def settings(clip: float | None, epochs: int) -> Settings:
    return Settings(
        epochs=epochs, schedule=Constant(base=0.05), optimizer=SGD(momentum=0.9), clip=clip
    )


def garbage(attack: str, values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """What the hostile worker sends in place of its values."""
    if attack == "noise":
        return 100 * torch.randn(values.shape, generator=generator)
    return -values if attack == "flipped" else torch.full_like(values, 1000.0)


# -- simulated ------------------------------------------------------------------------------------


class HostileMixing:
    """A mixing before which one worker's row turns to garbage; its own model is left alone."""

    def __init__(self, mixing: Any, rows: torch.Tensor, attack: str) -> None:
        self._mixing, self._rows, self._attack = mixing, rows, attack
        self._generator = torch.Generator().manual_seed(1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mixing, name)

    def mix(self, index: int) -> None:
        """The round of an iteration."""
        own = self._rows[HOSTILE].clone()
        self._rows[HOSTILE] = garbage(self._attack, own, self._generator)
        self._mixing.mix(index)
        self._rows[HOSTILE] = own


def simulated(attack: str, clip: float | None, epochs: int) -> float:
    task = recipe("digits").task(Choices(num_workers=WORKERS))
    simulation = Simulation(task, plan(), settings(clip, epochs), compute_time=0.0)
    engine = simulation.engine
    if attack != "none":
        engine.mixing = HostileMixing(engine.mixing, engine.workers.parameters, attack)  # type: ignore[assignment]
    for _ in simulation:
        pass
    with torch.no_grad():
        models = [engine.workers.modules[worker].eval() for worker in HONEST]
        found = [task.evaluate(model).accuracy or 0.0 for model in models]
    return sum(found) / len(found)


# -- real processes -------------------------------------------------------------------------------


def lie(transport: Transport, attack: str) -> Any:
    """Let a transport send garbage in place of models, and boast about its reach."""
    post, generator = transport.post, torch.Generator().manual_seed(1)

    def lying(messages: Sequence[Message]) -> Any:
        told = []
        for message in messages:
            out = message.outgoing
            if out is not None and out.nbytes > _GREETING:
                wrong = garbage(attack, out.view(torch.float32), generator).view(torch.uint8)
                message = replace(message, outgoing=wrong)
            elif out is not None and out.dtype == torch.float64:
                message = replace(message, outgoing=torch.full_like(out, 1e300))
            told.append(message)
        return post(told)

    return lying


def work(output: Path, epochs: int) -> None:
    """One worker: every case in turn."""
    torch.set_num_threads(1)
    found: dict[str, float] = {}
    with worker_transport(plan().topology) as transport:
        truly = transport.post
        for attack in ATTACKS:
            for clip in (None, CLIP):
                task = recipe("digits").task(Choices(num_workers=WORKERS))
                training = Training(task, plan(), settings(clip, epochs), transport, timeout=100.0)
                steps = epochs * task.steps_per_epoch
                if transport.rank == HOSTILE and attack != "none":
                    transport.post = lie(transport, attack)  # type: ignore[method-assign]
                while training.iteration < steps:  # epochs without their evaluation of all workers
                    training._train()
                    training.progress.epoch += 1
                transport.post = truly  # type: ignore[method-assign]
                with torch.no_grad():
                    accuracy = task.evaluate(training.model.eval()).accuracy or 0.0
                answers = [float(a) for a in gather(transport, repr(accuracy).encode(), 100.0)]
                training.gossip.detach()
                found[f"{attack} {clip}"] = sum(answers[w] for w in HONEST) / len(HONEST)
        if transport.rank == 0:
            output.write_text(json.dumps(found))


def real(epochs: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        command = [__file__, "--work", str(output), "--epochs", str(epochs)]
        launch(command, WORKERS, environment={"OMP_NUM_THREADS": "1"})
        found: dict[str, float] = json.loads(output.read_text())
    return found


def plan() -> matcha.Plan:
    return matcha.plan(matcha.families.paper("er8"), 0.3, Greedy(effort="none"))


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--work", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--simulated", action="store_true", help="without real processes")
    options = parser.parse_args()
    if options.work is not None:
        work(options.work, options.epochs)
        return
    rows = {
        f"{attack} {clip}": {"simulated": simulated(attack, clip, options.epochs)}
        for attack in ATTACKS
        for clip in (None, CLIP)
    }
    if not options.simulated:
        for case, accuracy in real(options.epochs).items():
            rows[case]["processes"] = accuracy
    document = {"epochs": options.epochs, "clip": CLIP, "cases": rows, "load": os.getloadavg()}
    harness.finish(options.output, document, describe(document))


def describe(document: dict[str, Any]) -> str:
    """A line per attack, clipped and not."""
    lines = [f"{'worker 5 sends':16s} {'clip':>5s} {'simulated':>10s} {'processes':>10s}"]
    for case, row in document["cases"].items():
        attack, clip = case.split()
        shown = [f"{row[key]:10.1%}" if key in row else f"{'–':>10s}" for key in KEYS]
        lines.append(f"{WORDS[attack]:16s} {clip:>5s} {' '.join(shown)}")
    lines.append(f"honest workers' accuracy after {document['epochs']} epochs of digits")
    return "\n".join(lines)


KEYS = ("simulated", "processes")
WORDS = {
    "none": "what it has",
    "noise": "noise × 100",
    "flipped": "its model × −1",
    "constant": "1000 everywhere",
}

if __name__ == "__main__":
    sys.exit(main())
