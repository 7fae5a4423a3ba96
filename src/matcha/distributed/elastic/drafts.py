"""Drafts: the next stage of a plan, made beside training by a process of its own.

Planning takes seconds of Python, which a thread would take from the training loop; a process with
less priority takes them from nobody who has something to do.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from matcha.plans import Plan
from matcha.strategies.staged import next_level
from matcha.topology import Link

__all__ = ["Draft"]

_log = logging.getLogger("matcha.links")
_ANSWER = "import os; os.nice(5); from matcha.strategies.staged import answer; answer()"


class Draft:
    """A stage that is being made.

    Args:
        first: the plan that was asked for.
        seconds: what a meeting over each link takes.
        due: the iteration at which it comes into force.
    """

    def __init__(self, first: Plan, seconds: Mapping[Link, float], due: int) -> None:
        self.due = due
        self.seconds = dict(seconds)
        self._first = first
        self._answer = tempfile.TemporaryFile()  # noqa: SIM115  # open until it is asked for
        with tempfile.TemporaryFile() as question:
            question.write(json.dumps([first.to_json(), self.to_json()["links"]]).encode())
            question.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _ANSWER],
                stdin=question,
                stdout=self._answer,
                stderr=subprocess.DEVNULL,
            )

    def to_json(self) -> dict[str, Any]:
        """What another process needs to make the same."""
        return {"due": self.due, "links": [[*link, s] for link, s in self.seconds.items()]}

    def made(self) -> Plan:
        """The stage's plan; waits for it where it is not ready."""
        with self._answer as file:
            if self._process.wait() == 0:
                file.seek(0)
                return Plan.from_json(json.load(file))
        _log.info("planning in a process of its own failed; planning here")
        return next_level(self._first, self.seconds)

    def drop(self) -> None:
        """Forget it."""
        self._process.kill()
        self._process.wait()
        self._answer.close()
