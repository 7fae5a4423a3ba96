"""`import matcha` is quick and torch-free; the core runs where optional packages are absent."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "matplotlib", "sklearn", "plotly", "typer", "rich", "cvxpy", "pandas")


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


def test_import_pulls_in_nothing_heavy():
    loaded = run("import matcha, sys; print(*sorted({name.split('.')[0] for name in sys.modules}))")
    assert not set(HEAVY) & set(loaded.split())


def test_plans_run_where_only_numpy_is_installed(tmp_path):
    """A plan made elsewhere drives an engine on a machine without the planner's packages."""
    import matcha

    matcha.plan(matcha.families.ring(4), 0.5, "periodic").save(tmp_path / "plan.json")
    blocked = ("networkx", "rustworkx", "clarabel", "typer", "rich", "matplotlib", "torch")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n"
        f"import matcha, matcha.records\n"
        f"print(matcha.Plan.load({str(tmp_path / 'plan.json')!r}).round(1).indices)"
    )
    assert run(code).strip() == "(0, 1)"
