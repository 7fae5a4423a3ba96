"""Identity: what a checkpoint may be continued with, and with nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matcha.errors import InputError
from matcha.plans import PlanLike
from matcha.records import current_settings, differences
from matcha.training.settings import Settings
from matcha.training.task import Task


def identity(task: Task, plan: PlanLike, settings: Settings) -> dict[str, Any]:
    """What was trained, by whom and how, in plain values."""
    trained = {
        "task": task.name,
        "seed": task.seed,
        "number of workers": task.num_workers,
        **task.identity(),
    }
    found = {"plan": plan.digest, "task": trained, "settings": settings.describe()}
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def check_identity(path: Path, saved: Mapping[str, Any] | None, now: Mapping[str, Any]) -> None:
    """Refuse to go on with a checkpoint of something else.

    Raises:
        InputError: It differs in more than where the run ends, or does not say what it is of.
    """
    if saved is None:
        raise InputError(
            f"{str(path)!r} does not say what was trained (matcha 0.1 wrote it, or a script of "
            "its own): resume it with what wrote it, or start the run anew without --resume"
        )
    changed = [] if saved["plan"] == now["plan"] else ["plan"]
    changed += differences(saved["task"], now["task"])
    changed += differences(current_settings(saved["settings"]), now["settings"])
    if changed:
        raise InputError(
            f"{str(path)!r} was written with another {' and '.join(changed)}: "
            "resume it as it was, or start a new run"
        )


def check_schema(path: Path, schema: object, expected: str) -> None:
    """Refuse a checkpoint that another version wrote.

    Raises:
        InputError: Its schema is not the expected one.
    """
    if schema != expected:
        raise InputError(
            f"{str(path)!r} is a checkpoint of another version ({schema!r}, not {expected!r}): "
            "resume it with the matcha that wrote it, or start the run anew without --resume"
        )
