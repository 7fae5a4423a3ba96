"""Transport over torch.distributed: gloo anywhere, NCCL where every worker has its own GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from matcha.distributed.transports.base import Message, Pending, Transport
from matcha.distributed.transports.waiting import StallDetector
from matcha.errors import InputError

_EMPTY = torch.iinfo(torch.int64).min  # no message holds it
_PROBE = 1 << 20  # beyond all tags: no message has it
_PATIENCE = 2.0  # seconds to look for the cause of a failure
_STORE_PATIENCE = 2.0  # seconds; the store may have died with the worker that hosted it
_Call: TypeAlias = tuple[Callable[..., Any], Any, Message]
_Sign: TypeAlias = tuple[int, npt.NDArray[np.int64]]  # a peer, and where its sign of life arrives


class TorchTransport(Transport):
    """Messages over a process group of our own, made from the default group's workers.

    Our own group keeps our messages apart from collectives that the training script runs itself,
    also when the exchange runs on another thread. Making it is a collective call.

    Args:
        backend: `gloo` or `nccl`; by default what the default group uses for the current device.
        teams: Groups of processes that exchange with each other, this one in one of them; by
            default all processes are one team. Every process must pass the same teams.
        owns_default: Whether the default group was made for this transport and ends with it.

    Raises:
        InputError: There is no default group.
    """

    def __init__(
        self,
        backend: str | None = None,
        *,
        teams: Sequence[Sequence[int]] | None = None,
        owns_default: bool = False,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise InputError(
                "torch.distributed is not initialised: call torch.distributed.init_process_group() "
                "and start the script with torchrun or `matcha train`."
            )
        self._owns_default = owns_default
        me = dist.get_rank()
        teams = teams or [range(dist.get_world_size())]
        self._ranks = next(list(team) for team in teams if me in team)
        self.rank = self._ranks.index(me)
        self.num_workers = len(self._ranks)
        self.backend = backend or _default_backend()
        self.threads = self.backend == "gloo"
        if self.backend == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())
        # Making a group takes all processes, also those that are not in it.
        groups = [dist.new_group(list(team), backend=self.backend) for team in teams]
        self._group = groups[[me in team for team in teams].index(True)]
        self._notes = f"matcha/{self._group.group_name}/"
        self._probes: list[dist.Work | None] = []  # nothing is ever sent to them
        self._store = dist.distributed_c10d._get_default_store()
        if self.backend == "nccl":
            # A first grouped point-to-point call in which some workers take no part would hang:
            # NCCL then builds the communicator with all workers.
            dist.barrier(group=self._group)

    def post(self, messages: Sequence[Message]) -> Pending:
        """Start the messages in our own process group."""
        # Receives first: the other way round a shaped link takes almost twice as long.
        calls: list[_Call] = [
            (dist.irecv, m.incoming, m) for m in messages if m.incoming is not None
        ]
        calls += [(dist.isend, m.outgoing, m) for m in messages if m.outgoing is not None]
        signs = [_mark(m) for m in messages if _is_sign(m)]
        try:
            if self.backend == "nccl":
                return _Works(self, self._post_grouped(calls))
            ranks, group = self._ranks, self._group
            works = [(m.peer, call(t, ranks[m.peer], group, m.tag)) for call, t, m in calls]
        except RuntimeError as error:
            raise self.failure(messages[0].peer, _problem(error), _PATIENCE) from error
        return _Works(self, works, signs)

    def _post_grouped(self, calls: list[_Call]) -> list[tuple[int, dist.Work | None]]:
        # NCCL runs calls in order on one stream, so two workers that both receive first would wait
        # for each other; grouped calls are one kernel. Tags are unknown to it: order matches.
        ops = [dist.P2POp(call, t, self._ranks[m.peer], self._group) for call, t, m in calls]
        return [(calls[0][2].peer, work) for work in dist.batch_isend_irecv(ops)]

    def probe(self, peer: int) -> None:
        """Gloo refuses even to listen to a peer whose connection is closed."""
        if self.backend == "nccl":
            return
        try:
            self._probes.append(dist.irecv(torch.empty(1), self._ranks[peer], self._group, _PROBE))
        except RuntimeError as error:
            raise self.failure(peer, _problem(error), _PATIENCE) from error

    def name(self, rank: int) -> str:
        """Also names the process, where a worker has several."""
        name, process = super().name(rank), self._ranks[rank]
        if process == rank:
            return name
        return f"worker {rank}, {name.replace(str(rank), str(process), 1)}"

    def set_note(self, key: str, value: str) -> None:
        """Write to the key-value store that all workers share."""
        _quickly(lambda: self._store.set(f"{self._notes}{key}/{self.rank}", value))

    def get_note(self, rank: int, key: str) -> str:
        """Read from the key-value store that all workers share."""
        name = f"{self._notes}{key}/{rank}"
        found = _quickly(lambda: self._store.get(name) if self._store.check([name]) else None)
        return found.decode() if found else ""

    def close(self) -> None:
        """Destroy our process group, and the default one where it was made for us."""
        if dist.is_initialized():
            dist.destroy_process_group(None if self._owns_default else self._group)


class _Works(Pending):
    def __init__(
        self,
        transport: TorchTransport,
        works: list[tuple[int, dist.Work | None]],
        signs: Sequence[_Sign] = (),
    ) -> None:
        self.transport, self.works, self.signs = transport, works, list(signs)

    def has_come(self) -> bool:
        return all(memory[-1] != _EMPTY for _, memory in self.signs)

    def wait(self, timeout: float) -> None:
        # Gloo cannot wait a little and then a little more: a wait that times out ends the group.
        # While a peer may be away, watch the memory into which its sign of life is written.
        while self.signs:
            peer, memory = self.signs[0]
            if memory[-1] == _EMPTY:
                detector = StallDetector(self.transport, peer, timeout)
                while memory[-1] == _EMPTY:
                    detector.pause()
                detector.end()
            self.signs.pop(0)
        patience = min(_PATIENCE, 0.2 * timeout)
        limit = timedelta(seconds=timeout - patience)
        while self.works:
            peer, work = self.works[0]
            try:
                if work is not None:
                    work.wait(limit)
            except RuntimeError as error:
                problem = _problem(error, timeout)
                raise self.transport.failure(peer, problem, patience) from error
            self.works.pop(0)
        if self.transport.backend == "nccl":
            torch.cuda.current_stream().synchronize()


def _mark(message: Message) -> _Sign:
    assert message.incoming is not None
    memory = message.incoming.view(-1).numpy()
    memory[-1] = _EMPTY
    return message.peer, memory


def _is_sign(message: Message) -> bool:
    """Whether it is a short message of integers that shows that a peer is there."""
    incoming = message.incoming
    if incoming is None or incoming.device.type != "cpu":
        return False
    return incoming.dtype == torch.int64 and 0 < incoming.nbytes <= 64


def _default_backend() -> str:
    config = dist.get_backend_config()
    return "nccl" if torch.cuda.is_available() and "nccl" in config else "gloo"


def _problem(error: RuntimeError, timeout: float | None = None) -> str:
    text = str(error)
    if "imed out" in text or "imeout" in text:
        return f"did not answer within {timeout:g} s" if timeout else "did not answer in time"
    return "closed its connection: it crashed or was killed"


def _quickly(call: Callable[[], bytes | None]) -> bytes | None:
    result: list[bytes | None] = []

    def body() -> None:
        with suppress(RuntimeError):  # the store is gone: we only lose the better message
            result.append(call())

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(_STORE_PATIENCE)
    return result[0] if result else None
