"""Keep BLAS to one thread while many small matrices are worked on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def on_one_thread(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run a function with single-threaded BLAS.

    The planner's matrices are of order 10 to 100. Threads gain nothing there, and on a busy
    machine, or in a container that sees more cores than it may use, waiting for them made plans
    30 times slower.
    """

    @wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with _one_thread():
            return function(*args, **kwargs)

    return wrapped


def _one_thread() -> AbstractContextManager[Any]:
    limited: AbstractContextManager[Any] = _controller().limit(limits=1, user_api="blas")
    return limited


@lru_cache(maxsize=1)
def _controller() -> Any:
    # SciPy brings a BLAS of its own; load it first so that the controller knows of both.
    import scipy.linalg  # noqa: F401
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
