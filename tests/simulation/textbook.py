"""Decentralized SGD as a textbook writes it: one model after another, dense W(k), numpy vectors."""

from __future__ import annotations

import numpy as np
import torch
from tests.wires.definition import Definition

from matcha.wires import parse_wire


def gradients(task, model, points, epoch, step):
    """Every worker's stochastic gradient at its own point."""
    tables = {name: torch.from_numpy(table[step]) for name, table in task.tables(epoch).items()}
    inputs, targets = task.batch(tables)
    parameters, found = list(model.parameters()), []
    for i, point in enumerate(points):
        torch.nn.utils.vector_to_parameters(torch.from_numpy(point), parameters)
        loss, _ = task.loss(model, inputs[i], targets[i], task.initial_state())
        grads = torch.autograd.grad(loss, parameters)
        found.append(torch.cat([g.reshape(-1) for g in grads]).numpy())
    return np.stack(found)


def mixing_matrix(plan, k):
    """W(k) from the links alone: I − αΣL (eq. 2), or the product of I − αL over matchings.

    Where a plan has a weight for each link, it stands in α's place.
    """
    W, round_ = np.eye(plan.num_workers), plan.round(k)
    for position, matching in enumerate(round_.matchings):
        A = np.zeros_like(W)
        for (i, j), weight in zip(matching, round_.shares(position), strict=True):
            A[[i, j], [i, j]] += weight
            A[[i, j], [j, i]] -= weight
        W = W - A if plan.mixing == "laplacian" else W - A @ W
    return W


def train(task, plan, *, epochs, rate, overlap, momentum=0.0, nesterov=False, decay=0.0, wire=None):
    """The workers' parameters after training; rows are workers.

    With a wire, rounds are its definition's.
    """
    task.to(torch.device("cpu"), torch.float64)
    model = task.model().double().train()
    start = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    x = np.tile(start, (plan.num_workers, 1))
    memory = np.zeros_like(x)
    shapes = [tuple(p.shape) for p in model.parameters()]
    network = wire and Definition(parse_wire(wire), shapes, x)
    for k in range(epochs * task.steps_per_epoch):
        g = gradients(task, model, x, *divmod(k, task.steps_per_epoch)) + decay * x
        memory = momentum * memory + g
        u = g + momentum * memory if nesterov else memory
        W = mixing_matrix(plan, k)

        def mix(x, k=k, W=W):
            return network.mix(plan.round(k), x) if network else W @ x

        x = mix(x) - rate * u if overlap else mix(x - rate * u)
    return x
