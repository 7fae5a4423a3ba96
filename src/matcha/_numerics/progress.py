"""Progress: the one callback with which everything that takes long says how far it is."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TypeAlias

ProgressCallback: TypeAlias = Callable[[int, int, str], None]
"""Called with (done, total, steps): how many steps are done, how many there are, and what they are,
such as "plans", or "trials at most" where a search may end early. Other work starts again at 1."""


def stepper(total: int, steps: str, progress: ProgressCallback | None) -> Callable[[], None]:
    """Return a function to call after each of `total` steps, which counts them for `progress`.

    >>> step = stepper(3, "plans", print)
    >>> step(), step()
    1 3 plans
    2 3 plans
    (None, None)
    """
    done = count(1)
    return lambda: None if progress is None else progress(next(done), total, steps)
