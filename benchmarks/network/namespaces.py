"""A shaped network on one machine: hosts are network namespaces, links are shaped by `tc tbf`.

Every host has a network card to one switch, shaped to the same speed both ways. Where the topology
has link times, each of its links is a wire of its own instead, as fast as its time says. Hosts in
racks share a switch a rack, and each rack's switch one shaped uplink to the others. All of it
lives in namespaces of our own: the machine's network is not touched. Needs root on Linux, and the
commands `ip` and `tc` (package iproute2).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, Any

from matcha import Topology
from matcha.errors import InputError, MatchaError

PREFIX = "matcha-net-"
CARD = "eth0"
# A token bucket must hold what a timer tick lets through; too large, and short messages fly free.
_BURST_BYTES = 32 * 1024
_LATENCY_MS = 400
# A rack's messages queue here together. Where the last of them is dropped TCP notices after 200 ms
# in which the wire is idle, which is no property of the wire: the queue holds them all.
_UPLINK_LATENCY_MS = 4000


class NetworkError(MatchaError):
    """The shaped network cannot be built here."""


class Network:
    """m hosts and their links; a context manager that always takes them down again.

    Args:
        topology: the hosts, and with link times also the speed of each link.
        mbps: speed of every host's network card, each way; None leaves the cards unshaped.
        message_bytes: what the topology's link times are the time of.
        racks: the hosts of each rack; None puts all on one switch.
        uplink_mbps: speed of a rack's uplink, each way.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        mbps: float | None = None,
        message_bytes: int = 4_000_000,
        racks: Sequence[Sequence[int]] | None = None,
        uplink_mbps: float | None = None,
    ) -> None:
        check_possible()
        if mbps is not None and not mbps > 0:
            raise InputError(f"the speed must be positive, not {mbps} Mbit/s.")
        if topology.num_workers > 250:
            raise InputError(f"{topology.num_workers} hosts are more than one machine's network.")
        self.topology = topology
        self.mbps = mbps
        self.message_bytes = message_bytes
        self.racks = racks
        self.uplink_mbps = uplink_mbps
        self._name = f"{PREFIX}{os.getpid()}"
        self._hub = f"{self._name}-hub"
        self._processes: list[subprocess.Popen[bytes]] = []

    # -- building ---------------------------------------------------------------------------------

    def __enter__(self) -> Network:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def _build(self) -> None:
        _ip("netns", "add", self._hub)
        _ip("-n", self._hub, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._hub, "link", "set", "switch", "up")
        for number in range(len(self.racks or ())):
            self._add_rack(number)
        for rank in range(self.topology.num_workers):
            self._add_host(rank)
        if self.topology.link_times is not None and self.racks is None:
            pairs = zip(self.topology.links, self.topology.link_times, strict=True)
            for number, ((i, j), seconds) in enumerate(pairs):
                self._add_wire(number, i, j, 8e-6 * self.message_bytes / seconds)

    def _add_rack(self, number: int) -> None:
        switch, up, down = f"rack{number}", f"up{number}", f"down{number}"
        _ip("-n", self._hub, "link", "add", switch, "type", "bridge")
        _ip("-n", self._hub, "link", "set", switch, "up")
        _ip("-n", self._hub, "link", "add", up, "type", "veth", "peer", "name", down)
        for end, bridge in ((up, switch), (down, "switch")):
            _ip("-n", self._hub, "link", "set", end, "master", bridge)
            _ip("-n", self._hub, "link", "set", end, "up")
            if self.uplink_mbps is not None:
                _shape(self._hub, end, self.uplink_mbps, _UPLINK_LATENCY_MS)

    def _switch(self, rank: int) -> str:
        for number, hosts in enumerate(self.racks or ()):
            if rank in hosts:
                return f"rack{number}"
        return "switch"

    def _add_host(self, rank: int) -> None:
        host, port = self.host(rank), f"port{rank}"
        _ip("netns", "add", host)
        _ip("link", "add", CARD, "netns", host, "type", "veth", "peer", port, "netns", self._hub)
        _ip("-n", self._hub, "link", "set", port, "master", self._switch(rank))
        _ip("-n", self._hub, "link", "set", port, "up")
        _ip("-n", host, "addr", "add", f"{self.address(rank)}/24", "dev", CARD)
        _ip("-n", host, "link", "set", "lo", "up")
        _ip("-n", host, "link", "set", CARD, "up")
        if self.mbps is not None:
            _shape(host, CARD, self.mbps)
            _shape(self._hub, port, self.mbps)

    def _add_wire(self, number: int, i: int, j: int, mbps: float) -> None:
        # The other end keeps its one address; a route to it leads through this wire.
        name = f"wire{number}"
        ends = (self.host(i), self.host(j))
        _ip("link", "add", name, "netns", ends[0], "type", "veth", "peer", name, "netns", ends[1])
        for here, there in ((i, j), (j, i)):
            host = self.host(here)
            _ip("-n", host, "link", "set", name, "up")
            _ip("-n", host, "route", "add", f"{self.address(there)}/32", "dev", name)
            # A wire that is down must not be replaced by the way over the switch.
            hole = ["blackhole", f"{self.address(there)}/32", "metric", "9999"]
            _ip("-n", host, "route", "add", *hole)
            _in(host, "sysctl", "-qw", "net.ipv4.conf.all.rp_filter=0")
            _in(host, "sysctl", "-qw", f"net.ipv4.conf.{name}.rp_filter=0")
            _shape(host, name, mbps)

    def reshape(self, link: tuple[int, int], mbps: float) -> None:
        """Change the speed of a link that is a wire of its own, while it is used."""
        number = self.topology.links.index(link)
        for end in link:
            _shape(self.host(end), f"wire{number}", mbps, verb="change")

    # -- using ------------------------------------------------------------------------------------

    def host(self, rank: int) -> str:
        """The name of a host's namespace."""
        return f"{self._name}-{rank}"

    def address(self, rank: int) -> str:
        """A host's address."""
        return f"10.77.0.{rank + 1}"

    def environment(self, rank: int, port: int = 29500) -> dict[str, str]:
        """What a worker on a host needs to find the others, as torchrun would set it."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.topology.num_workers),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": CARD,
            "OMP_NUM_THREADS": "1",
        }

    def start(
        self,
        rank: int,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        output: IO[Any] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Run a command on a host."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.host(rank), *command],
            env={**os.environ, **self.environment(rank), **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def run(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> list[int]:
        """Run a command on every host at once and return the exit codes."""
        started = [
            self.start(rank, command, environment=environment)
            for rank in range(self.topology.num_workers)
        ]
        return [process.wait(timeout) for process in started]

    def cut(self, i: int, j: int) -> None:
        """Take the wire of a link down at one end."""
        _ip("-n", self.host(i), "link", "set", self._wire(i, j), "down")

    def mend(self, i: int, j: int) -> None:
        """Put a wire that was cut up again; the route through it went with it."""
        name = self._wire(i, j)
        _ip("-n", self.host(i), "link", "set", name, "up")
        _ip("-n", self.host(i), "route", "replace", f"{self.address(j)}/32", "dev", name)

    def isolate(self, rank: int, *, mended: bool = False) -> None:
        """Take a host's card down, or up again: what it sends or should get is lost in silence."""
        _ip("-n", self.host(rank), "link", "set", CARD, "up" if mended else "down")

    def _wire(self, i: int, j: int) -> str:
        if self.topology.link_times is None or self.racks is not None:
            raise InputError("only the links of a topology with link times are wires of their own.")
        return f"wire{self.topology.links.index((min(i, j), max(i, j)))}"

    # -- taking down ------------------------------------------------------------------------------

    def close(self) -> None:
        """End every process on the hosts and remove them; may be called twice."""
        remove(self._name)
        for process in self._processes:
            process.wait()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def check_possible() -> None:
    """Say in one sentence why a shaped network cannot be had here.

    Raises:
        NetworkError: not Linux, not root, or commands are missing.
    """
    if not sys.platform.startswith("linux"):
        raise NetworkError("a shaped network needs Linux: network namespaces and tc.")
    if os.geteuid() != 0:
        raise NetworkError("a shaped network needs root: run this with sudo.")
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        raise NetworkError(f"a shaped network needs {missing[0]!r}: apt install iproute2.")


def leftovers() -> list[str]:
    """Namespaces of ours that exist now, from any process."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    names = [line.split()[0] for line in listed.stdout.splitlines() if line.strip()]
    return [name for name in names if name.startswith(PREFIX)]


def remove(prefix: str = PREFIX) -> None:
    """End what runs in namespaces whose name begins so, and remove them."""
    for name in leftovers():
        if name == prefix or name.startswith(f"{prefix}-") or prefix == PREFIX:
            inside = subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
            )
            for pid in inside.stdout.split():
                subprocess.run(["kill", "-KILL", pid], check=False, stderr=subprocess.DEVNULL)
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def _shape(
    namespace: str, device: str, mbps: float, latency_ms: int = _LATENCY_MS, verb: str = "add"
) -> None:
    _in(
        namespace,
        *f"tc qdisc {verb} dev {device} root tbf rate {mbps * 1e6:.0f}bit".split(),
        *f"burst {max(_BURST_BYTES, int(mbps * 1e6 / 8 / 250))} latency {latency_ms}ms".split(),
    )


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _in(namespace: str, *command: str) -> None:
    _run("ip", "netns", "exec", namespace, *command)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip() or f"exit code {done.returncode}"
        raise NetworkError(f"`{' '.join(command)}` failed: {reason}")
