"""Jitter: random naps where workers meet, to find tests and code that rely on an order of workers.

    make races

Python imports this file at its start wherever its folder is on PYTHONPATH, also in processes that
tests start. JITTER is the probability of a nap before and after each of the calls below; threads
start late as well.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

CALLS = {
    "matcha.distributed.gossip": ("Gossip", "__init__ step detach"),
    "matcha.distributed.links.transport": (
        "LinkTransport",
        "__init__ post set_note start_at close _add_connection _on_frame _end _end_all",
    ),
    "matcha.distributed.elastic.membership": ("Membership", "join tend"),
    "matcha.distributed.links.connection": ("Connection", "send receive end"),
    "matcha.distributed.links.framing": (
        "FrameStream",
        "send receive_header finish shut leave",
    ),
}
_SHORT, _LONG = 0.05, 0.5
_LONG_SHARE = 0.1


def nap(probability: float) -> None:
    """Mostly do nothing, seldom sleep, and very seldom sleep long."""
    drawn = random.random() / probability
    if drawn < 1.0:
        time.sleep(random.random() * (_LONG if drawn < _LONG_SHARE else _SHORT))


def napping(call: Callable[..., Any], probability: float) -> Callable[..., Any]:
    """A call with a chance of a nap on either side."""

    @functools.wraps(call)
    def around(*args: Any, **kwargs: Any) -> Any:
        nap(probability)
        try:
            return call(*args, **kwargs)
        finally:
            nap(probability)

    return around


class Finder(importlib.abc.MetaPathFinder):
    """Changes the modules of CALLS as they are imported."""

    def __init__(self, probability: float) -> None:
        self.probability = probability
        self._looking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the finders below say, with a loader that changes the module at its end."""
        if name not in CALLS or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: self._change(load, module)  # type: ignore[method-assign]
        return spec

    def _change(self, load: Callable[[ModuleType], None], module: ModuleType) -> None:
        load(module)
        name, calls = CALLS[module.__name__]
        changed = getattr(module, name)
        for call in calls.split():
            setattr(changed, call, napping(changed.__dict__[call], self.probability))


def jitter(probability: float) -> None:
    """From now on, in this process."""
    sys.meta_path.insert(0, Finder(probability))
    run = threading.Thread.run

    def late(thread: threading.Thread) -> None:
        nap(3 * probability)
        run(thread)

    threading.Thread.run = late  # type: ignore[method-assign, assignment]


if float(os.environ.get("JITTER", "0")) > 0:
    jitter(float(os.environ["JITTER"]))
