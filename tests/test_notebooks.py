"""The notebooks of examples/ run from top to bottom and print what they show."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def outputs(notebook, kind):
    """What the cells of a notebook print, or show as `kind`."""
    found = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    if kind == "text":
        said = [output["text"] for output in found if output.output_type == "stream"]
        return ["".join(said)]  # where it is cut depends on the clock
    return [output["data"][kind] for output in found if kind in output.get("data", ())]


def run(name, tmp_path):
    """Run a notebook in a folder of its own: it prints what the stored one shows."""
    stored = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    again = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    client = NotebookClient(again, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=environment)
    assert outputs(again, "text") == outputs(stored, "text")
    assert len(outputs(again, "image/png")) == len(outputs(stored, "image/png")) >= 1
    assert sum("<animate" in shown for shown in outputs(again, "text/html")) >= 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Jupyter's own packages
def test_the_class_runs_and_prints_what_it_shows(tmp_path):
    run("gossip_class", tmp_path)


@pytest.mark.long("plans at three budgets and trains; the other notebook and test_display.py draw")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_study_runs_and_prints_what_it_shows(tmp_path):
    run("own_topology", tmp_path)
