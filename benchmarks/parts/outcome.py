"""What a benchmark leaves behind: a document for machines and its table for people."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

COMMITTED = Path(__file__).parents[1] / "results"
RESULTS = Path(os.environ.get("MATCHA_RESULTS", COMMITTED))


def write(output: Path, document: Any, text: str) -> None:
    """Write OUTPUT.json and OUTPUT.txt."""
    output.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps(document, indent=1) + "\n"
    output.with_suffix(".json").write_text(content, encoding="utf-8")
    output.with_suffix(".txt").write_text(text.rstrip("\n") + "\n", encoding="utf-8")
