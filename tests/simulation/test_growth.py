"""A team that grows and shrinks in the simulator is what the definition says."""

from __future__ import annotations

import torch

import matcha
from matcha import families
from matcha.plans import Events
from matcha.simulation import Simulation
from matcha.training.optimizers import SGD
from matcha.training.rates import Constant
from matcha.training.settings import Execution, Settings
from matcha.training.task import dealt
from matcha.zoo.recipes import Choices, recipe

EVENTS = Events.from_json(
    [
        {"at": 6, "join": {"worker": 4, "links": [1, 3]}},
        {"at": 6, "join": {"worker": 5, "links": [4, 0]}},
        {"at": 13, "leave": 1},
    ]
)
RATE = 0.05


def test_rows_come_and_go_as_the_definition_says():
    task = recipe("digits").task(Choices(num_workers=4))
    plan = matcha.plan(families.ring(4), 0.5, "greedy")
    settings = Settings(
        epochs=2,
        optimizer=SGD(momentum=0.9),
        schedule=Constant(base=RATE),
        execution=Execution(precision="float64"),
    )
    simulation = Simulation(task, plan, settings, events=EVENTS, compute_time=0.0)
    records = list(simulation)
    assert [record.members for record in records] == [5, 5]
    assert records[0].changes == [[6, 4, 1], [6, 5, 1], [13, 1, 0]]

    staged, steps = simulation.plan, task.steps_per_epoch
    task.to(torch.device("cpu"), torch.float64)
    shares = dealt(task, staged)
    models = [task.model().double() for _ in range(6)]
    flat = [torch.nn.utils.parameters_to_vector(m.parameters()).detach() for m in models]
    speed = [torch.zeros_like(x) for x in flat]
    for k in range(2 * steps):
        tables = {name: torch.from_numpy(t) for name, t in shares.tables(k // steps).items()}
        inputs, targets = shares.batch({name: table[k % steps] for name, table in tables.items()})
        if k == 6:
            mean = torch.stack(flat[:4]).mean(0)
            flat[4], speed[4] = mean.clone(), speed[1].clone()
            flat[5], speed[5] = mean.clone(), speed[0].clone()
        if k == 13:  # the others take over the share of worker 1
            stay = [0, 2, 3, 4, 5]
            shift = torch.stack(flat).mean(0) - torch.stack([flat[w] for w in stay]).mean(0)
            for worker in stay:
                flat[worker] = flat[worker] + shift
        for worker in staged.level_at(k).members:
            model = models[worker]
            torch.nn.utils.vector_to_parameters(flat[worker], model.parameters())
            loss, _ = task.loss(model, inputs[worker], targets[worker], ())
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            gradient = torch.nn.utils.parameters_to_vector(gradients)
            speed[worker] = 0.9 * speed[worker] + gradient
            flat[worker] = flat[worker] - RATE * speed[worker]
        mixed = staged.round(k).mix(torch.stack(flat).numpy())
        flat = list(torch.from_numpy(mixed))
    there = [0, 2, 3, 4, 5]
    found = simulation.engine.workers.stacked()
    for worker in there:
        torch.nn.utils.vector_to_parameters(flat[worker], models[worker].parameters())
        for name, value in models[worker].named_parameters():
            difference = value.detach() - found[name][worker].detach()
            assert float(difference.abs().max()) < 1e-10
