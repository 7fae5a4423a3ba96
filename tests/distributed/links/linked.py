"""Workers as threads over links of their own, on loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matcha import Topology
from matcha.distributed import Keys, LinkTransport, Peers
from matcha.distributed.links.peers import free_ports
from matcha.distributed.links.transport import Phase

HOST = "127.0.0.1"


def vanish(transport: LinkTransport) -> None:
    """End as a killed process does: no goodbye, all connections gone."""
    with transport.lock:
        transport.phase = Phase.CLOSED
        transport._end_all("died")
    if transport.listener is not None:
        transport.listener.close()


def cut_off(transport: LinkTransport, peer: int) -> None:
    """End the link to a neighbour and keep it from coming back."""
    with transport.lock:
        transport.barred.add(peer)
        if peer in transport.connections:
            transport._end(transport.connections[peer], "was cut off on purpose")


def mend(transport: LinkTransport, peer: int) -> None:
    """Let a link that was cut come back."""
    with transport.lock:
        transport.barred.discard(peer)
        transport._vacant.notify_all()


def local_peers(num_workers: int) -> Peers:
    return Peers(addresses=tuple((HOST, port) for port in free_ports(HOST, num_workers)))


def run_linked(
    topology: Topology,
    work: Callable[[LinkTransport], Any],
    *,
    peers: Peers | None = None,
    keys: Path | None = None,
    **options: Any,
) -> list[Any]:
    """As `run_threads`, over `LinkTransport`; a loaded machine may be silent for long."""
    peers = peers or local_peers(topology.num_workers)
    settings = {"timeout": 90.0, "start_timeout": 150.0, **options}
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}

    def body(rank: int) -> None:
        own = Keys(directory=keys, rank=rank) if keys else None
        try:
            transport = LinkTransport(topology, rank, peers, keys=own, **settings)
            try:
                results[rank] = work(transport)
            finally:
                transport.close()
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=body, args=(r,)) for r in range(topology.num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next(iter(errors.values()))  # the first: others may follow from it
    return [results[rank] for rank in range(topology.num_workers)]
