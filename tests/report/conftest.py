"""Runs to report on, made once."""

from __future__ import annotations

import pytest
from tests.quadratics import write_quadratic_run

import matcha
from matcha.report import write_report

STRATEGIES = ("vanilla", "periodic", "matcha", "greedy")


@pytest.fixture(scope="session")
def run_folders(tmp_path_factory):
    """One run a strategy on the paper's 8-worker graph."""
    root = tmp_path_factory.mktemp("runs")
    topology = matcha.families.paper("er8")
    for strategy in STRATEGIES:
        plan = matcha.plan(topology, 1.0 if strategy == "vanilla" else 0.3, strategy)
        write_quadratic_run(root / strategy, plan)
    return [root / strategy for strategy in STRATEGIES]


@pytest.fixture(scope="session")
def report_page(run_folders, tmp_path_factory):
    """Their report."""
    return write_report(run_folders, tmp_path_factory.mktemp("page") / "report.html", explore=True)
