"""Links of our own against gloo: speed of an exchange, sockets and start of many workers.

    sudo python benchmarks/links.py --output benchmarks/results/links

- Two workers exchange 25 MB (all that Gossip does in a round, mixing included) over gloo, over
  plain links and over links with TLS, on a link shaped to 1 Gbit/s and on loopback; all take turns
  in the same run. So do plain links without check sums, and without looks for values that are not
  finite (one before the round, one at each message): what noticing a fault costs.
- 64 workers on a ring and on an Erdős–Rényi graph: connections a worker holds, and seconds from the
  first to all links being up. Workers are threads of one process here, so imports do not count.

Without root the shaped link is left out, and said so.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist

from matcha import Round, Topology, families
from matcha._io.keys import new_keys
from matcha.distributed import Keys, LinkTransport, Peers, TorchTransport, Transport
from matcha.distributed.exchange.codecs import FloatCodec
from matcha.distributed.exchange.exchange import Exchange
from matcha.distributed.exchange.meeting import meetings
from matcha.distributed.launch.launcher import LocalWorkers
from matcha.distributed.links.peers import free_ports
from matcha.distributed.transports.collectives import barrier
from matcha.errors import MatchaError

MEGABYTES, MBPS, WORKERS = 25, 1000, 64
UNSUMMED, UNCHECKED = "links without check sums", "nor looks for NaN"
PAIR = Round(matchings=(((0, 1),),), indices=(0,), mixing="pairwise", weight=0.5)


class Unchecked(Exchange):
    """An exchange that does not look for values that are not finite."""

    takes_all = True

    def _check_finite(self, iteration: int) -> None:
        pass


def work(folder: Path, hosts: str, output: Path, repetitions: int) -> None:
    """One of two workers: the three transports in turns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    gloo = TorchTransport()
    first, second = hosts.split(",")
    contenders: dict[str, Transport] = {"gloo": gloo}
    for number, name in enumerate(("links", UNSUMMED, "links with TLS")):
        ends = ((first, 29700 + 2 * number), (second, 29701 + 2 * number))
        keys = Keys(directory=folder / "keys", rank=rank) if "TLS" in name else None
        contenders[name] = LinkTransport(
            families.path(2), rank, Peers(addresses=ends), keys=keys, timeout=60
        )
    barrier(gloo, 120)
    for connection in contenders[UNSUMMED].connections.values():  # type: ignore[attr-defined]
        connection.stream.is_checked = False
    barrier(gloo, 120)
    x = torch.ones(MEGABYTES * 250_000)
    codecs = [FloatCodec([x], bucket_bytes=25_000_000)]
    exchanges = {name: Exchange(each, codecs, timeout=120) for name, each in contenders.items()}
    exchanges[UNCHECKED] = Unchecked(contenders[UNSUMMED], codecs, timeout=120)
    times: dict[str, list[float]] = {name: [] for name in exchanges}
    for repetition in range(repetitions + 1):
        for name, exchange in exchanges.items():
            barrier(gloo, 120)
            started = time.perf_counter()
            exchange.run(PAIR, [*meetings(PAIR, rank)], repetition)
            if repetition:
                times[name].append(time.perf_counter() - started)
    if rank == 0:
        output.write_text(json.dumps({n: statistics.median(t) for n, t in times.items()}))
    barrier(gloo, 120)
    for transport in contenders.values():
        transport.close()
    dist.destroy_process_group()


def many(topology: Topology) -> dict[str, Any]:
    """Start so many workers as threads; count what each holds."""
    host = "127.0.0.1"
    ports = free_ports(host, topology.num_workers)
    peers = Peers(addresses=tuple((host, port) for port in ports))
    held: dict[int, int] = {}
    done = threading.Barrier(topology.num_workers)

    def body(rank: int) -> None:
        transport = LinkTransport(topology, rank, peers, timeout=60, start_timeout=300)
        listens = transport.listener is not None
        held[rank] = transport.num_sockets() - listens
        done.wait(300)
        transport.close()

    started = time.perf_counter()
    threads = [threading.Thread(target=body, args=(r,)) for r in range(topology.num_workers)]
    for thread in threads:
        thread.start()
    while len(held) < topology.num_workers:
        time.sleep(0.05)
    seconds = time.perf_counter() - started
    for thread in threads:
        thread.join()
    return {
        "topology": str(topology),
        "links_each": sorted(set(topology.degrees)),
        "connections_are_links": all(held[r] == d for r, d in enumerate(topology.degrees)),
        "full_mesh_each": topology.num_workers - 1,
        "seconds_until_all_are_up": seconds,
    }


def measure(folder: Path, repetitions: int) -> dict[str, Any]:
    new_keys(folder / "keys", 2, days=2)
    command = [sys.executable, __file__, "--worker", str(folder)]
    result: dict[str, Any] = {"seconds": {}}
    file = folder / "loopback.json"
    with LocalWorkers([*command, "127.0.0.1,127.0.0.1", str(file), str(repetitions)], 2) as workers:
        if any(workers.wait(timeout=300)):
            raise SystemExit("the loopback workers failed")
    result["seconds"]["loopback"] = json.loads(file.read_text())
    sys.path.insert(0, str(Path(__file__).parent / "network"))
    from namespaces import Network

    try:
        with Network(families.path(2), mbps=MBPS) as network:
            file = folder / "shaped.json"
            hosts = f"{network.address(0)},{network.address(1)}"
            if any(network.run([*command, hosts, str(file), str(repetitions)], timeout=300)):
                raise SystemExit("the workers on the shaped link failed")
        result["seconds"][f"{MBPS} Mbit/s"] = json.loads(file.read_text())
    except MatchaError as error:
        result["not_measured"] = str(error)
    result["many"] = [
        many(families.ring(WORKERS)),
        many(families.erdos_renyi(WORKERS, 0.1, seed=1)),
    ]
    return result


def describe(result: dict[str, Any]) -> str:
    lines = [f"an exchange of {MEGABYTES} MB, ms (share of gloo's speed)"]
    for link, seconds in result["seconds"].items():
        shown = [f"{n} {1e3 * s:.0f} ({seconds['gloo'] / s:.0%})" for n, s in seconds.items()]
        lines.append(f"  {link:<12}" + "   ".join(shown))
    lines += [
        f"{row['topology']}: connections per worker = its links ({row['links_each'][0]} to "
        f"{row['links_each'][-1]}): {row['connections_are_links']}; a full mesh has "
        f"{row['full_mesh_each']}; all up after {row['seconds_until_all_are_up']:.1f} s"
        for row in result["many"]
    ]
    if "not_measured" in result:
        lines.append(f"the shaped link was not measured: {result['not_measured']}")
    return "\n".join(lines)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--worker", nargs=4, metavar=("FOLDER", "HOSTS", "FILE", "REPETITIONS"))
    options = parser.parse_args()
    if options.worker:
        folder, hosts, file, repetitions = options.worker
        work(Path(folder), hosts, Path(file), int(repetitions))
        return
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(Path(scratch), options.repetitions)
    result |= {"benchmark": "links", "machine": harness.machine()}
    harness.finish(options.output, result, describe(result))


if __name__ == "__main__":
    main()
