"""Numerical parts with no word of networks: eigenvectors, small cone programs, threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from itertools import count
from typing import Any, ParamSpec, TypeAlias, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")

ProgressCallback: TypeAlias = Callable[[int, int, str], None]
"""Called with (done, total, steps): how many steps are done, how many there are, and what they are,
such as "plans", or "trials at most" where a search may end early. Other work starts again at 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """How good an optimised value is known to be.

    `value` was reached and no answer can exceed `bound`; `gap` is (bound − value) / value.
    """

    value: float
    bound: float
    gap: float
    iterations: int
    seconds: float = field(compare=False)


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


def on_one_thread(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run a function with single-threaded BLAS.

    The planner's matrices are of order 10 to 100. Threads gain nothing there, and on a busy
    machine, or in a container that sees more cores than it may use, waiting for them made plans
    30 times slower.
    """

    @wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with _controller().limit(limits=1, user_api="blas"):
            return function(*args, **kwargs)

    return wrapped


@lru_cache(maxsize=1)
def _controller() -> Any:
    # SciPy brings a BLAS of its own; load it first so that the controller knows of both.
    import scipy.linalg  # noqa: F401
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
