"""A worker to be killed, stopped or confused; `train` is also run by threads for the right answer.

As a script: `faults.py SCENARIO FOLDER`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from matcha import families, plan
from matcha.distributed import Gossip, TorchTransport, Transport
from matcha.errors import ExchangeError, InputError
from matcha.schedules import EvenlySpaced

NUM_WORKERS = 4
VICTIM = 2
ITERATIONS = 24
SAVED_AT, KILLED_AT = 8, 13
PLAN = plan(families.ring(NUM_WORKERS), 0.7, "matcha", seed=1)


class Suicidal(TorchTransport):
    """Dies in the middle of an exchange: the first message is out, the second never will be."""

    armed = False

    def post(self, messages: Any) -> Any:
        pending = super().post(messages)
        if self.armed and messages[0].outgoing.nbytes > 100:
            os.kill(os.getpid(), signal.SIGKILL)
        return pending


def make_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape) / 8)
    return model


def train(
    transport: Transport,
    *,
    save: Path | None = None,
    load: Path | None = None,
    timeout: float = 30.0,
    pause: float = 0.0,
    progress: Path | None = None,
) -> torch.Tensor:
    """Train with momentum on random batches and return the parameters."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    random = torch.Generator().manual_seed(transport.rank)
    generators = {"data": random}
    with Gossip(
        model, optimizer, PLAN, transport=transport, timeout=timeout, bucket_cap_mb=0.05
    ) as gossip:
        if load is not None:
            gossip.load(load, generators=generators)
        while gossip.iteration < ITERATIONS:
            if isinstance(transport, Suicidal):
                transport.armed = transport.rank == VICTIM and gossip.iteration >= KILLED_AT
            batch = torch.randn(16, 64, generator=random, dtype=torch.float64)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            if progress is not None:
                progress.write_text(str(gossip.iteration))
            if save is not None and gossip.iteration == SAVED_AT:
                gossip.save(save, generators=generators)
            time.sleep(pause)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def confuse(transport: Transport) -> None:
    """Three attempts in which rank 1 comes with something else than the others."""
    odd = transport.rank == 1
    other = plan(families.ring(NUM_WORKERS), 0.5, "matcha", seed=1)
    seeded = plan(families.ring(NUM_WORKERS), 0.7, "matcha", seed=2)
    for chosen, model in (
        (other if odd else PLAN, make_model()),
        (PLAN, nn.Linear(3, 3) if odd else make_model()),
        (seeded if odd else PLAN, make_model()),
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            Gossip(model, optimizer, chosen, transport=transport, timeout=20)
        except InputError as error:
            print(error)


def run_ahead(transport: Transport, folder: Path) -> None:
    """0 and 1 meet in every round, and so do 2 and 3; 0 goes on only when 2 and 3 have finished."""
    pairs = PLAN.with_process(
        matchings=(((0, 1), (2, 3)),),
        schedule=EvenlySpaced(frequency=1.0, num_matchings=1),
    )
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Gossip(model, optimizer, pairs, transport=transport, timeout=60) as gossip:
        while gossip.iteration < ITERATIONS:
            if transport.rank == 0 and gossip.iteration == 3:
                end = time.monotonic() + 50
                while not all((folder / f"finished-{rank}").exists() for rank in (2, 3)):
                    assert time.monotonic() < end, "2 and 3 wait for 0, whom they never meet"
                    time.sleep(0.02)
            optimizer.zero_grad()
            model(torch.ones(1, 64, dtype=torch.float64)).sum().backward()
            optimizer.step()
        (folder / f"finished-{transport.rank}").touch()


def main(scenario: str, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    root = Path(folder)
    transport = Suicidal() if scenario == "kill" else TorchTransport()
    progress = root / f"progress-{transport.rank}"
    try:
        if scenario == "kill":
            train(transport, save=root / "saved", timeout=20)
        elif scenario == "resume":
            result = train(transport, load=root / "saved", pause=0.05, progress=progress)
            torch.save(result, root / f"result-{transport.rank}.pt")
        elif scenario == "stop":
            train(transport, timeout=4, pause=0.05, progress=progress)
        elif scenario == "confuse":
            confuse(transport)
            run_ahead(transport, root)
    except ExchangeError as error:
        print(f"{time.time():.3f} {error}")
        sys.exit(3)


if __name__ == "__main__":
    main(*sys.argv[1:])
