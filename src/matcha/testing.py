"""Testing: workers as threads of one process, for tests of your own and for teaching."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
    ready = threading.Barrier(num_workers)  # so that each worker has a thread of its own

    def body(rank: int) -> T:
        ready.wait()
        return work(network.transport(rank))

    with ThreadPoolExecutor(num_workers) as pool:
        futures = [pool.submit(body, rank) for rank in range(num_workers)]
    return [future.result() for future in futures]
