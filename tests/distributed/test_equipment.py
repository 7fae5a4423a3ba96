from __future__ import annotations

import torch
from torch import nn

import matcha
from matcha.distributed import Gossip, run_threads

PLAN = matcha.plan(matcha.families.path(2), 0.5, "periodic")


def test_a_round_without_a_meeting_is_none_met() -> None:
    def work(transport):
        model = nn.Linear(2, 1)
        gossip = Gossip(model, torch.optim.SGD(model.parameters(), lr=0.1), PLAN,
                        transport=transport, deadline=150.0)  # fmt: skip
        tools, found = gossip._tools, []
        for _ in range(4):
            tools.has_met = False
            gossip.step()
            found.append(tools.has_met)
        gossip.detach()
        return found

    busy = [bool(PLAN.round(k)) for k in range(4)]
    assert run_threads(2, work) == [busy, busy]
