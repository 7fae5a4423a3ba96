"""Testing: workers as threads of one process, for tests of your own and for teaching."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from matcha.distributed.transports.emulation import MemoryNetwork, MemoryTransport

__all__ = ["MemoryNetwork", "MemoryTransport", "run_threads"]

T = TypeVar("T")


def run_threads(num_workers: int, work: Callable[[MemoryTransport], T]) -> list[T]:
    """Run `work` once per worker, each in a thread with its own transport, and collect the results.

    The lowest rank's exception is raised again once all have ended.

    >>> run_threads(3, lambda transport: transport.rank**2)
    [0, 1, 4]
    """
    network = MemoryNetwork(num_workers)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def body(rank: int) -> None:
        try:
            results[rank] = work(network.transport(rank))
        except BaseException as error:  # handed to the caller below
            errors[rank] = error

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [results[rank] for rank in range(num_workers)]
