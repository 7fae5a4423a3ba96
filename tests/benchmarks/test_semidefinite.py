"""The benchmark of the small cone programs: both solvers find the same optimum."""

import json
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_both_solvers_agree(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    pytest.importorskip("clarabel")
    from semidefinite import general, program, solve

    for workers in (6, 9):
        A, a, c, b = program(workers, seed=3)
        p = solve(A, a, c, b).p[0]
        ours = np.linalg.eigvalsh(np.einsum("j,jkl->kl", p, A[0]))[0]
        assert ours == pytest.approx(general(A[0], c[0], float(b[0])), rel=1e-6)


def test_the_docstring_says_what_was_measured():
    from matcha._numerics import semidefinite

    rows = json.loads((BENCHMARKS / "results" / "semidefinite.json").read_text())["rows"]
    by_order = {row["order"]: row["clarabel"] / row["alone"] for row in rows}
    text = " ".join(semidefinite.__doc__.split())
    for order in (30, 63):
        assert f"{by_order[order]:.0f} times faster at order {order}" in text or (
            f"{by_order[order]:.0f} times at order {order}" in text
        )
    assert all(row["stacked"] < row["clarabel"] for row in rows)
    assert max(row["difference"] for row in rows) < 1e-7
