"""How deep a reader has to go: frames of ours between `optimizer.step()` and what is sent."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from tests.distributed.links.linked import run_linked
from torch import nn

import matcha
from matcha.distributed import Gossip
from matcha.distributed.links.connection import Connection
from matcha.testing import MemoryTransport, run_threads
from matcha.wires import parse_wire

SOURCE = str(Path(matcha.__file__).parent)
PLAN = matcha.plan(matcha.families.ring(4), 1.0, "greedy")


def step(optimizer: torch.optim.Optimizer) -> None:
    """What `frames` looks for on the stack."""
    optimizer.step()


def frames() -> list[str]:
    """Our functions on the stack, from the optimizer's step inwards; empty outside a step."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code is step.__code__:
            return found[::-1]
        if code.co_filename.startswith(SOURCE):
            found.append(f"{Path(code.co_filename).stem}.{code.co_name}")
        frame = frame.f_back
    return []


def deepest(stacks: list[list[str]]) -> list[str]:
    assert stacks, "nothing was sent"
    return max(stacks, key=len)


def train(transport: Any, plan: matcha.Plan = PLAN, **options: Any) -> None:
    model = nn.Linear(40, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"transport": transport, "timeout": 60.0, **options}
    with Gossip(model, optimizer, plan, **options):
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.ones(2, 40)).square().mean().backward()
            step(optimizer)


@pytest.mark.parametrize("wire", ["float32", "modulo:4"])
def test_a_plain_step_sends_within_seven_frames(wire) -> None:
    stacks: list[list[str]] = []

    class Watched(MemoryTransport):
        def post(self, messages):
            stacks.append([*frames(), "MemoryTransport.post"])  # instead of this class's
            return super().post(messages)

    def work(transport: MemoryTransport) -> None:
        train(Watched(transport.network, transport.rank), replace(PLAN, wire=parse_wire(wire)))

    run_threads(4, work)
    found = deepest([stack for stack in stacks if len(stack) > 1])
    assert len(found) <= 7, "\n".join(found)


def test_with_everything_on_it_sends_within_ten_frames(monkeypatch) -> None:
    """Elastic meetings, replanning and clipping, over links of our own."""
    stacks: list[list[str]] = []
    send = Connection.send

    def watched(self, *arguments, **options):
        stacks.append([*frames(), "Connection.send"])
        return send(self, *arguments, **options)

    monkeypatch.setattr(Connection, "send", watched)
    options = {"on_loss": "continue", "replan": 100, "clip": 1.0}
    run_linked(PLAN.topology, lambda transport: train(transport, **options))
    found = deepest([stack for stack in stacks if len(stack) > 1])
    sending = {name for stack in stacks for name in stack}
    assert {"hooks.before", "hooks.after"} <= sending  # clipping sends before, elastic after
    assert len(found) <= 10, "\n".join(found)
