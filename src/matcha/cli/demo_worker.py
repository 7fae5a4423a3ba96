"""One worker of the demo: train with every strategy in turn, within one process group."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from matcha.cli.demo import Demo
from matcha.distributed.launch.environment import worker_transport
from matcha.distributed.train import Network, run_worker
from matcha.plans import Plan
from matcha.training.jobs import Job
from matcha.training.optimizers import SGD
from matcha.training.rates import Constant
from matcha.training.settings import Settings
from matcha.training.task import TaskSpec
from matcha.zoo.data import digits, partition
from matcha.zoo.images import ImageTask
from matcha.zoo.models import perceptron

NUM_TRAIN, BATCH = 800, 32


def make_task(num_workers: int, seed: int) -> ImageTask:
    """Digits of which each worker sees a few, and many to test on; a perceptron of 1.2 MB."""
    images = digits(NUM_TRAIN)
    parts = partition(images.train_labels, num_workers, "shards", seed=seed)
    model = partial(perceptron, images.num_classes)
    return ImageTask("digits", images, parts, model, batch_size=BATCH, seed=seed)


def make_settings(demo: Demo) -> Settings:
    """Momentum and a constant rate, as runs end when they have reached the target."""
    return Settings(
        epochs=demo.epochs,
        schedule=Constant(base=demo.learning_rate),
        optimizer=SGD(momentum=0.9, nesterov=True, weight_decay=1e-4),
        target_loss=demo.target_loss,
    )


def main(spec: Path) -> None:
    """Train what the demo's file asks for."""
    demo = Demo.read(spec)
    network = Network(link_mbps=demo.link_mbps, slower=demo.slower)
    with worker_transport() as transport:
        for name in demo.runs:
            made = Plan.load(demo.plan_file(name))
            choices = {"partition": "shards", "num_train": NUM_TRAIN, "model": "perceptron"}
            task = TaskSpec(
                name="digits",
                seed=demo.seed,
                choices={**choices, "batch_size": BATCH},
                make=partial(make_task, made.num_workers, demo.seed),
            )
            job = Job(
                directory=demo.run_directory(name),
                task=task,
                plan=made,
                settings=make_settings(demo),
                name=name,
            )
            run_worker(job, transport, network, max_seconds=demo.seconds)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
