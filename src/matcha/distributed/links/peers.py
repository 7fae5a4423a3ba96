"""Peers: where each worker can be reached, and which end of a link dials the other."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from matcha.errors import ExchangeError, InputError
from matcha.topology import Link, Topology

Address = tuple[str, int]
DEFAULT_PORT = 29600
_LINE = re.compile(r"(?:([0-9]{1,9})(?:\s+(\S+)\s+([0-9]{1,9}))?)?")


def in_words(address: tuple[Any, ...]) -> str:
    """An address as people write it.

    >>> in_words(("a.example", 29600)), in_words(("::1", 29600, 0, 0))
    ('a.example:29600', '[::1]:29600')
    """
    host, port, *_ = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The address of each worker; None for one that cannot be reached from outside (NAT).

    >>> peers = Peers(addresses=(("a.example", 29600), None))
    >>> dials((0, 1), peers)
    1
    """

    addresses: tuple[Address | None, ...]

    def __post_init__(self) -> None:
        seen: set[Address] = set()
        for host, port in filter(None, self.addresses):
            if not host or not 0 < port < 65536:
                raise InputError(f"{host!r} port {port} is not the address of a worker.")
            if (host, port) in seen:
                raise InputError(f"two workers have the same address {in_words((host, port))}.")
            seen.add((host, port))

    @classmethod
    def from_json(cls, addresses: Iterable[Any]) -> Peers:
        """Read what JSON makes of addresses."""
        pairs = (None if each is None else (str(each[0]), int(each[1])) for each in addresses)
        return cls(addresses=tuple(pairs))

    def check(self, topology: Topology) -> None:
        """Refuse another number of workers, and a link of which neither end can be reached."""
        if len(self.addresses) != topology.num_workers:
            raise InputError(
                f"there are {len(self.addresses)} peers, but the topology has "
                f"{topology.num_workers} workers."
            )
        for link in topology.links:
            dials(link, self)

    def save(self, path: str | Path) -> None:
        """Write a peers file."""
        lines = [
            f"{rank}" if address is None else f"{rank} {address[0]} {address[1]}"
            for rank, address in enumerate(self.addresses)
        ]
        Path(path).write_text("# rank host port\n" + "\n".join(lines) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """Who is in a team that grows and shrinks, by what links, and where they can be reached."""

    topology: Topology
    peers: Peers
    gone: frozenset[int] = frozenset()
    """Numbers that are not in use: of workers that left for good, or never came."""
    network: str = ""
    """A digest of the team's first topology: its name among other teams."""
    stage: int = 0
    """How many times it has changed."""

    @classmethod
    def first(cls, topology: Topology, peers: Peers) -> Team:
        """The team as it starts."""
        network = hashlib.sha256(repr(topology.links).encode()).hexdigest()[:16]
        return cls(topology=topology, peers=peers, network=network)

    def neighbors(self, rank: int) -> frozenset[int]:
        """The workers to which a worker has links."""
        return frozenset(self.topology.neighbors(rank)) - self.gone

    def to_json(self) -> dict[str, Any]:
        """Where its workers are, for one that knows the rest."""
        return {"peers": self.peers.addresses, "gone": sorted(self.gone), "stage": self.stage}

    @classmethod
    def from_json(cls, told: Mapping[str, Any], topology: Topology, network: str) -> Team:
        """Read what `to_json` made."""
        return cls(
            topology=topology,
            peers=Peers.from_json(told["peers"]),
            gone=frozenset(told["gone"]),
            network=network,
            stage=int(told["stage"]),
        )


def dials(link: Link, peers: Peers) -> int:
    """Which end of a link dials the other: the lower rank, where the higher can be reached."""
    low, high = min(link), max(link)
    if peers.addresses[high] is not None:
        return low
    if peers.addresses[low] is not None:
        return high
    raise InputError(
        f"workers {low} and {high} share a link, but the peers file gives neither a host: one of "
        "them must be reachable, or the topology must do without that link."
    )


def read_peers(path: str | Path) -> Peers:
    """The peers in a file: lines `RANK HOST PORT`, or `RANK` alone for a worker behind NAT.

    Raises:
        InputError: the file is missing, or a line is not of that form.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if isinstance(error, UnicodeDecodeError):
            reason = "it is not text"
        raise InputError(f"the peers file {str(path)!r} cannot be read: {reason}.") from None
    found: dict[int, Address | None] = {}
    for number, line in enumerate(text.splitlines(), 1):
        said = _LINE.fullmatch(line.partition("#")[0].strip())
        if said is None:
            raise InputError(f"{str(path)!r} line {number} is not `RANK HOST PORT`: {line!r}.")
        rank, host, port = said.groups()
        if rank is None:  # an empty line
            continue
        if int(rank) in found:
            raise InputError(f"{str(path)!r} line {number} names worker {int(rank)} again.")
        found[int(rank)] = (host, int(port)) if host else None
    missing = [rank for rank in range(len(found) or 1) if rank not in found]
    if missing:
        raise InputError(f"{str(path)!r} does not name worker {missing[0]}.")
    return Peers(addresses=tuple(found[rank] for rank in range(len(found))))


def from_names(pattern: str, num_workers: int, port: int = DEFAULT_PORT) -> Peers:
    """Peers by a pattern of names, as a Kubernetes StatefulSet gives them.

    >>> from_names("matcha-{rank}.matcha", 2).addresses
    (('matcha-0.matcha', 29600), ('matcha-1.matcha', 29600))
    """
    if "{rank}" not in pattern:
        raise InputError(f"the pattern of names {pattern!r} lacks {{rank}}.")
    names = (pattern.replace("{rank}", str(rank)) for rank in range(num_workers))
    return Peers(addresses=tuple((name, port) for name in names))


def from_slurm(environment: Mapping[str, str] = os.environ, port: int = DEFAULT_PORT) -> Peers:
    """Peers of a Slurm job step: the hosts of its node list, and one port per task on each.

    >>> job = {"SLURM_STEP_NODELIST": "n[1-2],gpu", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}
    >>> [f"{host}:{port}" for host, port in from_slurm(job).addresses]
    ['n1:29600', 'n1:29601', 'n2:29600', 'n2:29601', 'gpu:29600']
    """
    try:
        nodes = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
        tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment["SLURM_TASKS_PER_NODE"]
    except KeyError as error:
        raise InputError(f"this is not a Slurm job step: {error.args[0]} is not set.") from None
    counts: list[int] = []
    for part in tasks.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise InputError(f"Slurm's tasks per node {tasks!r} cannot be read.")
        counts += [int(found[1])] * int(found[2] or 1)
    hosts = _expand(nodes)
    if len(hosts) != len(counts):
        raise InputError(f"Slurm names {len(hosts)} hosts but tasks on {len(counts)}.")
    # Slurm's block distribution, its default: ranks fill one host after another.
    by_host = zip(hosts, counts, strict=True)
    return Peers(addresses=tuple((host, port + k) for host, n in by_host for k in range(n)))


def _expand(nodes: str) -> list[str]:
    """The hosts of a Slurm node list such as `node[01-03,7],login`."""
    hosts: list[str] = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\])?", nodes):
        stem, _, inside = part.partition("[")
        if not inside:
            hosts.append(stem)
            continue
        for span in inside.rstrip("]").split(","):
            first, _, last = span.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            hosts += [f"{stem}{number:0{len(first)}d}" for number in numbers]
    return hosts


def meet(rank: int, num_workers: int, own: Address, timeout: float) -> Peers:
    """Learn every worker's address from the rendezvous of torchrun (MASTER_ADDR, MASTER_PORT).

    Only the start needs it: once links are up, the rendezvous may die.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            world_size=num_workers,
            is_master=rank == 0 and not hosted,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )
        store.set(f"matcha/peer/{rank}", f"{own[0]} {own[1]}")
        lines = [store.get(f"matcha/peer/{other}").decode() for other in range(num_workers)]
        # The store may live in one of the workers: none leaves before all have read it.
        store.set(f"matcha/peer-read/{rank}", "")
        store.wait([f"matcha/peer-read/{other}" for other in range(num_workers)])
    except (KeyError, RuntimeError) as error:
        raise ExchangeError(f"the workers did not meet at the rendezvous: {error}.") from error
    return Peers.from_json(line.split() for line in lines)


def free_ports(host: str, count: int, besides: Collection[int] = ()) -> Sequence[int]:
    """Ports that are free on this host now, below the range that outgoing connections use.

    Those in `besides` are left to others, who may not listen there at the moment.
    """
    chosen: list[int] = []
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    start = 20_000 + os.getpid() * 37 % 10_000
    for port in sorted({*range(start, start + 2_000)} - {*besides}):
        with socket.socket(family) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind((host, port))
            except OSError:
                continue
        chosen.append(port)
        if len(chosen) == count:
            return chosen
    raise ExchangeError(f"{host} has no {count} free ports for workers.")
