"""Workers that end early, leave for long work, or call what others do not; also run as processes.

As a script: `manners.py FOLDER`, every scenario over gloo; under mpirun with `mpi` what MPI can do.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from matcha import Plan, families, plan
from matcha.distributed import Gossip, Message, MpiTransport, TorchTransport, Transport
from matcha.errors import ExchangeError, InputError

NUM_WORKERS = 3
STEPS = (5, 12, 8)
TIMEOUT = 150.0


def make_plan(num_workers: int) -> Plan:
    topology = families.ring(num_workers) if num_workers > 2 else families.path(2)
    return plan(topology, 0.6, "matcha", seed=2)


PLAN = make_plan(NUM_WORKERS)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 1, bias=False).double()
    nn.init.ones_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    optimizer.zero_grad()
    (model(torch.eye(3).double()) - rank).square().sum().backward()
    optimizer.step()


def join(transport: Transport, overlap: bool = False) -> tuple[torch.Tensor, int]:
    """Each worker takes its own number of steps."""
    model, optimizer = make()
    chosen = make_plan(transport.num_workers)
    gossip = Gossip(model, optimizer, chosen, transport=transport, timeout=TIMEOUT, overlap=overlap)
    with gossip, gossip.join():
        for _ in range(STEPS[transport.rank]):
            step(model, optimizer, transport.rank)
    return model.weight.detach().clone(), gossip.iteration


def finish_early(transport: Transport) -> str:
    """The same without join: the error that the others see."""
    model, optimizer = make()
    try:
        chosen = make_plan(transport.num_workers)
        with Gossip(model, optimizer, chosen, transport=transport, timeout=TIMEOUT):
            for _ in range(STEPS[transport.rank]):
                step(model, optimizer, transport.rank)
    except ExchangeError as error:
        return str(error)
    return ""


def away(transport: Transport) -> int:
    """Worker 0 is away for longer than anybody's timeout; 2 waits for 1, which waits for 0."""
    model, optimizer = make()
    with Gossip(model, optimizer, PLAN, transport=transport, timeout=TIMEOUT) as gossip:
        step(model, optimizer, transport.rank)
        if transport.rank == 0:
            with gossip.away():
                stay_away(transport, (1, 2), 7)
        else:
            wait_for_note(transport)
            gossip.state.exchange.timeout = 5.0
        for _ in range(8):
            step(model, optimizer, transport.rank)
            if not transport.get_note(0, "away"):
                gossip.state.exchange.timeout = TIMEOUT
        return gossip.iteration


def wait_for_note(transport: Transport) -> None:
    """Until worker 0 is known to be away, and let it know."""
    poll(lambda: transport.get_note(0, "away"))
    transport.set_note("seen", "yes")


def stay_away(transport: Transport, others: Iterable[int], seconds: float) -> None:
    """From when all others know."""
    poll(lambda: all(transport.get_note(rank, "seen") for rank in others))
    time.sleep(seconds)


def poll(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + TIMEOUT
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def away_from_a_message(transport: Transport) -> str:
    """Worker 1 waits for worker 0 beyond its timeout, as long as that one is away, and then not.

    The error of the second wait.
    """
    value = torch.zeros(1)
    if transport.rank == 0:
        transport.set_note("away", "yes")
        stay_away(transport, (1,), 2)
        transport.post([Message(peer=1, tag=1, outgoing=value + 7)]).wait(TIMEOUT)
        transport.set_note("away", "")
        with suppress(ExchangeError):  # links of our own end with the other's patience
            transport.post([Message(peer=1, tag=3, incoming=value)]).wait(TIMEOUT)
    if transport.rank != 1:
        return ""
    wait_for_note(transport)
    transport.post([Message(peer=0, tag=1, incoming=value)]).wait(1.0)
    assert value == 7
    try:
        transport.post([Message(peer=0, tag=2, incoming=value)]).wait(1.0)
    except ExchangeError as error:
        return str(error)
    finally:
        transport.post([Message(peer=0, tag=3, outgoing=value)])
    return ""


def average_alone(transport: Transport) -> str:
    """Worker 0 alone asks for the average."""
    model, optimizer = make()
    gossip = Gossip(model, optimizer, PLAN, transport=transport, timeout=6)
    try:
        for k in range(20):
            if transport.rank == 0 and k == 3:
                with gossip.averaged():
                    pass
            step(model, optimizer, transport.rank)
    except ExchangeError as error:
        return str(error)
    return ""


def wrap(transport: Transport) -> str:
    """A model inside DistributedDataParallel, wrapped after Gossip has come."""
    model, optimizer = make()
    with Gossip(model, optimizer, PLAN, transport=transport, timeout=20):
        parallel = DistributedDataParallel(model)
        try:
            step(parallel, optimizer, transport.rank)
        except InputError as error:
            return str(error)
    return ""


def over_mpi(folder: Path) -> None:
    transport = MpiTransport()
    said = away_from_a_message(transport)
    transport = MpiTransport()
    weights, iteration = join(transport)
    early = finish_early(MpiTransport())
    result = {"join": weights, "iteration": iteration, "away": said, "early": early}
    torch.save(result, folder / f"{transport.rank}.pt")


def main(folder: str, kind: str = "gloo") -> None:
    torch.set_num_threads(1)
    if kind == "mpi":
        over_mpi(Path(folder))
        return
    torch.distributed.init_process_group("gloo")
    transport = TorchTransport()
    weights, iteration = join(transport)
    torch.save(
        {
            "join": weights,
            "iteration": iteration,
            "away": away(transport),
            "wrap": wrap(transport),
            "alone": average_alone(TorchTransport()),
            "early": finish_early(TorchTransport()),
        },
        Path(folder) / f"{transport.rank}.pt",
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
