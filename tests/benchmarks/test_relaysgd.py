"""The runs of RelaySGD's task: each has its plan, and sends no more than it says."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import relaysgd_gpu as bench
from matcha.plans import Plan
from matcha.zoo.models import build

FOLDER = Path(__file__).parents[2] / "benchmarks"
SHAPES = [tuple(p.shape) for p in build("vgg11", 10).parameters()]
WHOLE = 4 * sum(p.numel() for p in build("vgg11", 10).parameters())
RUNS = {
    (run.plan_file(), run.wire): run
    for name in ("screen", "main", "more", "proxy")
    for run in bench.LISTS[name]
    if run.momentum != bench.SCREENED
}


@pytest.mark.parametrize("run", RUNS.values(), ids=lambda run: f"{run.plan_file()}-{run.wire}")
def test_a_run_sends_what_it_says(run):
    plan = Plan.load(FOLDER / "plans" / run.plan_file())
    number = 1000
    messages = bench._meetings(plan, number)
    if plan.timing.is_gathered:  # each worker's message goes once around
        messages = sum(map(bool, plan.rounds(0, number))) / number * (plan.num_workers - 1)
    sent = messages * bench.parse_wire(run.wire).message_bytes(SHAPES) / WHOLE
    assert sent <= 1.02 * bench.THEIRS * run.bytes
    assert sent >= 0.65 * bench.THEIRS * run.bytes


def test_the_best_of_the_screening_is_taken_with_its_wire():
    tried = bench.LISTS["screen"]
    lines = [
        {"run": asdict(run), "records": [{"train_loss": loss}]}
        for run, loss in zip(tried, (1.5, 1.2, None, 1.9), strict=False)
    ]
    asked = bench.Run(momentum=bench.SCREENED, concentration=0.1, seed=2)
    found = bench.screened(asked, lines)
    assert (found.wire, found.strategy, found.rate) == (
        tried[1].wire,
        tried[1].strategy,
        tried[1].rate,
    )
    assert (found.concentration, found.seed, found.epochs) == (0.1, 2, 200)
