"""Workers that end early, leave for long work, or call what others do not; also run as processes.

As a script: `manners.py FOLDER`, every scenario over gloo.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from matcha import families, plan
from matcha.distributed import Gossip, TorchTransport, Transport
from matcha.errors import ExchangeError, InputError

NUM_WORKERS = 3
PLAN = plan(families.ring(NUM_WORKERS), 0.6, "matcha", seed=2)
STEPS = (5, 12, 8)


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
    gossip = Gossip(model, optimizer, PLAN, transport=transport, deadline=5, overlap=overlap)
    with gossip, gossip.join():
        for _ in range(STEPS[transport.rank]):
            step(model, optimizer, transport.rank)
    return model.weight.detach().clone(), gossip.iteration


def finish_early(transport: Transport) -> str:
    """The same without join: the error that the others see."""
    model, optimizer = make()
    try:
        with Gossip(model, optimizer, PLAN, transport=transport, deadline=20):
            for _ in range(STEPS[transport.rank]):
                step(model, optimizer, transport.rank)
    except ExchangeError as error:
        return str(error)
    return ""


def away(transport: Transport) -> int:
    """Worker 0 is away for longer than anybody's deadline; 2 waits for 1, which waits for 0."""
    model, optimizer = make()
    with Gossip(model, optimizer, PLAN, transport=transport, deadline=2) as gossip:
        step(model, optimizer, transport.rank)
        if transport.rank == 0:
            with gossip.away():
                time.sleep(5)
        for _ in range(8):
            step(model, optimizer, transport.rank)
        return gossip.iteration


def average_alone(transport: Transport) -> str:
    """Worker 0 alone asks for the average."""
    model, optimizer = make()
    gossip = Gossip(model, optimizer, PLAN, transport=transport, deadline=6)
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
    with Gossip(model, optimizer, PLAN, transport=transport, deadline=20):
        parallel = DistributedDataParallel(model)
        try:
            step(parallel, optimizer, transport.rank)
        except InputError as error:
            return str(error)
    return ""


def main(folder: str) -> None:
    torch.set_num_threads(1)
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
