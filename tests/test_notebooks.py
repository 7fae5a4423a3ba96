"""The notebooks of examples/ run from top to bottom and print what they show."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def outputs(notebook, kind):
    """What the cells of a notebook print, or show as `kind`."""
    found = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    if kind == "text":
        return [output["text"] for output in found if output.output_type == "stream"]
    return [output["data"][kind] for output in found if kind in output.get("data", ())]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Jupyter's own packages
def test_a_notebook_runs_and_prints_what_it_shows(path, tmp_path):
    stored = nbformat.read(path, as_version=4)
    again = nbformat.read(path, as_version=4)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    client = NotebookClient(again, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=environment)
    assert outputs(again, "text") == outputs(stored, "text")
    assert len(outputs(again, "image/png")) == len(outputs(stored, "image/png")) >= 1
    assert sum("<animate" in shown for shown in outputs(again, "text/html")) >= 1
