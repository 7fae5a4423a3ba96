"""Ours: greedy's rounds over small wires, beside the gradient."""

from functools import partial

from peers import Method, Ours
from torch import nn

import matcha
from matcha.distributed import TorchTransport

PLANS = [
    (0.02, "float32"),
    (0.005, "modulo:4"),
    (0.002, "modulo:4"),
    (0.002, "modulo:2"),
    (0.0005, "modulo:3"),
]
"""Budget and wire."""


def make(budget: float, wire: str, model: nn.Module) -> Method:
    """Gossip by a plan that every worker makes for itself; the seed makes them alike."""
    plan = matcha.plan("paper:er8", budget, "greedy", wire=wire)
    return Ours(model, plan, TorchTransport("gloo"), overlap=True)


ROWS = {
    f"greedy {budget:g}, {wire}, overlap": partial(make, budget, wire) for budget, wire in PLANS
}
