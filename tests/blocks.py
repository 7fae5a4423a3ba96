"""Runs the code blocks of a Markdown page, in order, in one process and one directory.

Python blocks share a namespace, as a reader who types them along would have it. A Python block
with a title (```python title="train.py") is a file that a later shell block runs. Shell blocks run
in bash, with `matcha`, `python` and `torchrun` being those of this interpreter, each a fork of one
process (`forked_commands.py`). A block that cannot run in a test says why, on the line before its
fence:

    <!-- not run: needs a Slurm cluster -->
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

PYTHON = frozenset({"python", "py"})
SHELL = frozenset({"bash", "sh", "shell", "console"})
# Prose, data and output; anything else is a block that nobody checks.
INERT = frozenset({"text", "json", "jsonl", "yaml", "toml", "ini", "xml", "csv", "diff"})
_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,})(?P<info>[^`]*)$")
_MARK = re.compile(r"^\s*<!-- not run: (?P<reason>.+?) -->\s*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block: where it stands, what it is, and why it does not run, if so."""

    line: int
    language: str
    title: str | None
    text: str
    not_run: str | None


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    lines = page.splitlines()
    number = 0
    while number < len(lines):
        opening = _FENCE.match(lines[number])
        if opening is None:
            number += 1
            continue
        start, body = number, []
        number += 1
        while number < len(lines) and lines[number].strip() != opening["fence"]:
            body.append(lines[number])
            number += 1
        if number == len(lines):
            raise ValueError(f"the block at line {start + 1} has no end")
        number += 1
        info = opening["info"].strip()
        title = re.search(r'title="([^"]+)"', info)
        mark = _MARK.match(lines[start - 1]) if start else None
        found.append(
            Block(
                line=start + 1,
                language=(re.match(r"[\w+-]*", info) or [""])[0].lower(),
                title=title[1] if title else None,
                text=textwrap.dedent("\n".join(body)) + "\n",
                not_run=mark["reason"] if mark else None,
            )
        )
    return found


def run(page: Path) -> int:
    """Run a page's blocks in the current directory; the number of those that ran."""
    sys.path.append(str(Path(__file__).parent.parent))
    from tests.forked_commands import install

    commands = Path.cwd() / ".commands"
    install(commands)
    environment = {
        **os.environ,
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "PYTHON_EXEC": str(commands / "python"),  # what torchrun starts workers by
    }
    namespace: dict[str, object] = {"__name__": "__main__"}
    sys.path.insert(0, os.getcwd())  # files of the page can be imported
    ran = 0
    for block in blocks(page.read_text(encoding="utf-8")):
        place = f"{page.name}:{block.line}"
        if block.language not in PYTHON | SHELL:
            continue
        if block.not_run:
            print(f"{place}: not run: {block.not_run}", flush=True)
            continue
        started = time.perf_counter()
        if block.language in SHELL:
            subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.text], env=environment, check=True
            )
        elif block.title:
            Path(block.title).write_text(block.text, encoding="utf-8")
        else:
            # The page's own line numbers in tracebacks.
            code = compile("\n" * block.line + block.text, str(page), "exec")
            exec(code, namespace)
        ran += 1
        print(f"{place}: {time.perf_counter() - started:.1f} s", flush=True)
    return ran


if __name__ == "__main__":
    try:
        run(Path(sys.argv[1]))
    except Exception:
        traceback.print_exc()
        sys.exit(1)
