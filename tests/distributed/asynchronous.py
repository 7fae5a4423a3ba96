"""A worker that meets others asynchronously; as a script, over gloo: `asynchronous.py FOLDER`."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from matcha import families, plan
from matcha.distributed import Gossip, TorchTransport, Transport
from matcha.distributed.exchange.background import Rendezvous

NUM_WORKERS = 4
PLAN = plan(families.ring(NUM_WORKERS), 1.0, "matcha", seed=2)
RATE = 1e-3


def train(transport: Transport) -> dict[str, Any]:
    """Train with worker 0 slow; returns where it ends, and where its steps alone would lead."""
    rank = transport.rank
    model = nn.Linear(300, 20).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    gossip = Gossip(
        model,
        optimizer,
        PLAN,
        transport=transport,
        asynchronous=True,
        timeout=150,
        bucket_cap_mb=0.01,
    )
    with torch.no_grad():
        model.weight.normal_(generator=torch.Generator().manual_seed(rank))
    alone = [p.detach().clone() for p in model.parameters()]
    rng = random.Random(rank)
    for k in range(40 if rank else 10):
        optimizer.zero_grad()
        model(torch.full((2, 300), 0.01 * (k + rank)).double()).sum().backward()
        for value, p in zip(alone, model.parameters(), strict=True):
            value -= RATE * p.grad
        time.sleep((1 if rank else 4) * 2e-3 * rng.random())
        optimizer.step()
        if k == 5:
            gossip.consensus_distance()
    assert gossip.state.asynchrony is not None
    rendezvous = gossip.state.asynchrony.rendezvous
    rendezvous.want(dict.fromkeys(PLAN.topology.neighbors(rank), 0.5))
    meet_all(rendezvous)
    gossip.detach()
    return {"end": _flat(model.parameters()), "alone": _flat(alone), "held": rendezvous.held}


def meet_all(rendezvous: Rendezvous) -> None:
    """Wait until all wishes are met; only where the neighbours will want this worker too."""
    with rendezvous._changed:
        rendezvous._wait(lambda: all(li.wanted is None for li in rendezvous._lines), "partners")
        rendezvous._wait(lambda: not rendezvous._meeting, "a meeting to end")


def _flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def check(found: list[dict[str, Any]]) -> None:
    """The sum over workers is where their steps alone would have led it."""
    ends, alone = (torch.stack([f[part] for f in found]) for part in ("end", "alone"))
    assert (ends.mean(0) - alone.mean(0)).abs().max() < 1e-12
    assert min(f["held"] for f in found) >= 2
    assert not torch.equal(ends, alone)


def main(folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    transport = TorchTransport()
    torch.save(train(transport), Path(folder) / f"{transport.rank}.pt")
    transport.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
