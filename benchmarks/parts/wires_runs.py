"""Trainings over wires: what a run is, how it is spelt, and the lists that the issue asks for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from matcha.training.momentum import parse_momentum
from matcha.wires import parse_wire
from matcha.zoo.models import LanguageModel, Transformer, build


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training."""

    task: str = "cifar100"
    model: str = "wideresnet16-4"
    topology: str = "paper:er8"
    partition: str = "iid"
    concentration: float = 0.5
    bytes: float = 1.0
    wire: str = "float32"
    momentum: str = "local"
    strategy: str = "greedy"
    seed: int = 0
    epochs: int = 36
    rate: float = 0.4
    rounds: float = 0.0
    """C_b of the rounds; 0: what the bytes buy. Runs that differ in nothing but their wire share a
    plan this way: plans of almost the same budget have other cycles."""
    images: int = 0
    """The first so many of the training images; 0: all of them."""

    @property
    def group(self) -> tuple[object, ...]:
        """Runs of one group share an engine."""
        return (
            *(self.task, self.model, self.topology, self.partition),
            *(self.concentration, self.images),
        )

    @property
    def row(self) -> Run:
        """Runs of one row of the table differ by their seed."""
        return replace(self, seed=0)

    def key(self) -> str:
        """All that says what is run."""
        return ",".join(f"{k}={v}" for k, v in asdict(self).items())

    def budget(self) -> float:
        """C_b of the rounds: as given, or as many as these bytes buy."""
        if self.rounds:
            return self.rounds
        momentum = parse_momentum(self.momentum)
        messages = momentum.messages if momentum else 1
        share = parse_wire(self.wire).size_ratio(_shapes(self) if "lowrank" in self.wire else None)
        return float(f"{min(1.0, self.bytes / (share * messages)):.4g}")

    def plan_file(self) -> str:
        """The name of its plan's file."""
        place = self.topology.replace(":", "-").replace("/", "-")
        return f"{place}_{self.strategy}_{self.budget():g}.json"


def _runs(**values: Any) -> list[Run]:
    seeds = values.pop("seeds", (0, 1, 2))
    return [Run(**values, seed=seed) for seed in seeds]


_GN = {
    "task": "cifar10",
    "model": "resnet20-gn",
    "topology": "paper:geometric16-d10",
    "partition": "dirichlet",
    "concentration": 0.1,
    "rate": 0.4,
    "epochs": 40,
}
_PTB = {"task": "ptb", "model": "lstm", "rate": 40.0, "epochs": 12}
_GPT = {"task": "ptb-transformer", "model": "transformer", "rate": 1e-3, "epochs": 15}
_QG, _OUT = "quasi-global", "outer"

LISTS: dict[str, list[Run]] = {
    # First what decides the defaults, one seed each; then three seeds of what issue 12 asks for.
    "explore": [
        Run(strategy="vanilla"),
        Run(bytes=0.02, wire="modulo:3"),
        Run(bytes=0.02, wire="modulo:3", momentum=_QG),
        Run(bytes=0.005, wire="modulo:3", momentum=_QG),
        Run(bytes=0.005, wire="modulo:4", momentum=_QG),
        Run(bytes=0.005, wire="lowrank:4", momentum=_QG),
        Run(bytes=0.002, wire="modulo:3", momentum=_QG),
        Run(bytes=0.002, wire="modulo:3", momentum=_OUT),
        Run(bytes=0.002, wire="lowrank:2", momentum=_QG),
        Run(bytes=0.02, momentum=_QG),
        Run(bytes=0.02, momentum=_OUT),
        Run(bytes=0.005, momentum=_QG),
        Run(bytes=0.005, momentum=_OUT),
        Run(bytes=0.1, wire="modulo:8", momentum=_QG),
        Run(bytes=0.1, wire="modulo:4", momentum=_QG),
    ],
    "cifar100": [
        *_runs(strategy="vanilla"),
        *_runs(bytes=0.1, wire="modulo:4", momentum=_QG),
        *_runs(bytes=0.02, wire="modulo:3", momentum=_QG),
        *_runs(bytes=0.005, wire="modulo:3", momentum=_QG),
        *_runs(bytes=0.002, wire="modulo:3", momentum=_QG),
        *_runs(bytes=0.1),
        *_runs(bytes=0.02),
        *_runs(bytes=0.005),
        *_runs(bytes=0.02, wire="modulo:8"),
        *_runs(bytes=0.08),
    ],
    # Is an 8-bit message as good as a whole one in the same rounds? For both plans of the first
    # comparison, whose budgets of 0.08 and 0.07817 have other cycles.
    "eight-bits": [
        run
        for rounds in (0.08, 0.07817)
        for wire in ("float32", "modulo:8")
        for run in _runs(bytes=rounds if wire == "float32" else 0.02, wire=wire, rounds=rounds)
    ],
    "long": [
        Run(strategy="vanilla", epochs=200),
        Run(bytes=0.02, wire="modulo:3", momentum=_QG, epochs=200),
        Run(bytes=0.005, wire="modulo:3", momentum=_QG, epochs=200),
    ],
    # Most telling first: few bytes and what `auto` makes of them, one seed of all, then the others.
    "cifar10-gn": [
        Run(**_GN, **row, seed=seed)  # type: ignore[arg-type]
        for seed in (0, 1, 2)
        for row in (
            {"bytes": 0.02, "wire": "modulo:3", "momentum": "auto"},
            {"bytes": 0.02, "wire": "modulo:3", "momentum": _QG},
            {"bytes": 0.1, "momentum": "auto"},
            {"bytes": 0.1, "momentum": _QG},
            {"bytes": 1.0, "strategy": "vanilla"},
            {"bytes": 0.02, "momentum": "auto"},
            {"bytes": 0.02, "momentum": _QG},
            {"bytes": 0.1},
            {"bytes": 0.02},
            {"bytes": 0.1, "momentum": "tracking"},
            {"bytes": 1.0, "strategy": "relaysum"},
        )
    ],
    "ptb": [
        Run(**_PTB, strategy="vanilla"),
        Run(**_PTB, bytes=0.02, wire="modulo:3"),
        Run(**_PTB, bytes=0.005, wire="modulo:3"),
        Run(**_PTB, bytes=0.005, wire="modulo:3", momentum=_OUT),
        Run(**_PTB, bytes=0.02),
    ],
    "transformer": [
        Run(**_GPT, strategy="vanilla"),
        Run(**_GPT, bytes=0.02, wire="modulo:3"),
        Run(**_GPT, bytes=0.02, wire="modulo:3", momentum=_QG),
        Run(**_GPT, bytes=0.005, wire="modulo:3"),
        Run(**_GPT, bytes=0.005, wire="modulo:3", momentum=_QG),
        Run(**_GPT, bytes=0.02),
    ],
}


def parse(words: Iterable[str]) -> Iterator[Run]:
    """Runs by the name of a list, or as key=value,..."""
    kinds = {field.name: type(field.default) for field in fields(Run)}
    for word in words:
        if word in LISTS:
            yield from LISTS[word]
            continue
        values = dict(part.split("=", 1) for part in word.split(","))
        values = {k: v.replace("+", ",") for k, v in values.items()}
        first, _, last = values.pop("seeds", values.pop("seed", "0")).partition("-")
        chosen = {k: kinds[k](v) for k, v in values.items()}
        for seed in range(int(first), int(last or first) + 1):
            yield Run(**chosen, seed=seed)


def _shapes(run: Run) -> list[tuple[int, ...]]:
    models: dict[str, Any] = {"lstm": LanguageModel, "transformer": Transformer}
    classes = {"cifar100": 100}.get(run.task, 10)
    model = models[run.model](10_000) if run.model in models else build(run.model, classes)
    return [tuple(p.shape) for p in model.parameters()]
