"""Runs the code blocks of a Markdown page, in order, in one process and one directory.

Python blocks share a namespace, as a reader who types them along would have it. A Python block
with a title (```python title="train.py") is a file that a later shell block runs. Shell blocks run
in bash, with `matcha`, `python` and `torchrun` being those of this interpreter. A block that cannot
run in a test says why, on the line before its fence:

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
_COMMANDS = {"matcha": "-m matcha.cli", "python": "", "torchrun": "-m torch.distributed.run"}


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
    environment = {**os.environ, "PATH": f"{_commands()}{os.pathsep}{os.environ['PATH']}"}
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


def _commands() -> str:
    """A directory whose commands are this interpreter's, whatever is installed where."""
    folder = Path.cwd() / ".commands"
    folder.mkdir(exist_ok=True)
    for name, module in _COMMANDS.items():
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        script.chmod(0o755)
    return str(folder)


if __name__ == "__main__":
    try:
        run(Path(sys.argv[1]))
    except Exception:
        traceback.print_exc()
        sys.exit(1)
