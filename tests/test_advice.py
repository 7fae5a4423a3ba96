"""Advice: what the rows say follows from sizes and speeds, and "use DDP" is one of the answers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from tests.commands import matcha_command

from matcha.errors import InputError
from matcha.plans import Plan
from matcha.topology import families
from matcha.tuning import Advice, advise
from matcha.tuning.advice import COSTS

SLOW = {"compute_time": 0.1, "model_mb": 10.0, "link_mbps": 100.0}


@cache
def on_slow_links(**more: bool) -> Advice:
    return advise(4, **SLOW, **more)


def test_ddp_is_the_advice_where_bytes_are_free():
    found = advise(4, compute_time=0.1, model_mb=10, link_mbps=100_000)
    assert found.best is found.choices[0]
    assert found.sentence.startswith("Use DDP")


def test_slow_links_ask_for_a_plan_and_its_figures_follow_from_sizes():
    found = on_slow_links()
    ddp, local, *plans = found.choices
    # Behind a switch a ring sends 2 · 3/4 of a model over one link.
    assert ddp.comm_seconds == pytest.approx(1.5 * 0.8)
    assert ddp.megabytes == pytest.approx(15.0)
    assert ddp.iteration_seconds == pytest.approx(0.1 / 3 + 1.2)
    assert local.comm_seconds < ddp.comm_seconds
    assert found.best in plans
    assert 1 <= len(plans) <= 3
    for choice in plans:
        assert choice.iteration_seconds == pytest.approx(0.1 + choice.comm_seconds)
        assert choice.comm_seconds == pytest.approx(choice.plan.expected_comm_time)
        assert choice.megabytes < ddp.megabytes
    assert found.best.name in found.sentence
    assert min(c.seconds for c in found.choices) == found.best.seconds
    assert found.best.name in found.table()


def test_data_that_are_alike_need_less():
    alike, different = on_slow_links(alike=True), on_slow_links()
    assert alike.best.comm_seconds < different.best.comm_seconds
    assert alike.best.disagreement > different.best.disagreement


def test_momentum_makes_disagreement_dearer():
    plain, heavy = on_slow_links(alike=True, momentum=False), on_slow_links(alike=True)
    assert plain.best.comm_seconds <= heavy.best.comm_seconds
    assert plain.best.seconds < heavy.best.seconds


def test_overlap_hides_the_exchange_of_plans():
    beside = on_slow_links(overlap=True).best
    assert beside.iteration_seconds == max(0.1, beside.comm_seconds)


def test_measured_link_times_need_no_size():
    graph = families.ring(4).with_link_times([0.5, 0.5, 0.5, 2.0])
    found = advise(graph, compute_time=0.1)
    assert found.choices[0].comm_seconds == pytest.approx(
        1.5 * 1.0
    )  # in the order 0, 1, 3, 2, around the slow link
    assert found.best.megabytes is None
    with pytest.raises(InputError, match="its own link times"):
        advise(graph, compute_time=0.1, link_mbps=100, model_mb=1)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"model_mb": None}, "give model_mb"),
        ({"link_mbps": 0.0}, "must be positive"),
        ({"compute_time": -1.0}, "positive seconds"),
        ({"latency": -1.0}, "0 or more"),
    ],
)
def test_what_is_missing_or_wrong_is_said(wrong, sentence):
    with pytest.raises(InputError, match=sentence):
        advise(4, **(SLOW | wrong))


def test_the_costs_are_those_that_were_measured():
    results = Path(__file__).parents[1] / "benchmarks" / "results" / "advise.json"
    measured = json.loads(results.read_text(encoding="utf-8"))["costs"]
    assert json.loads(json.dumps(COSTS)) == measured


def test_the_command_prints_the_sentence_and_keeps_the_plan(tmp_path):
    common = ("--compute-time", 0.1, "--model-mb", 10, "--link-mbps", 100)
    plan = tmp_path / "plan.json"
    done = matcha_command("advise", "--workers", 4, *common, "-o", plan)
    assert done.returncode == 0, done.stderr
    assert "Use greedy" in done.stdout
    done = matcha_command("advise", "ring:4", *common, "--json")
    document = json.loads(done.stdout)
    ddp, local, *_ = (row["name"] for row in document["rows"])
    assert (ddp, local.partition(",")[0]) == ("DDP", "local SGD")
    assert document["recommendation"] in [row["name"] for row in document["rows"]]
    assert Plan.load(plan).strategy == "greedy"
    done = matcha_command("advise", "ring:4", "--workers", 4, *common)
    assert done.returncode == 2
    assert "one of the two" in done.stderr
