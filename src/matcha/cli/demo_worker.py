"""One worker of the demo: train with every strategy in turn, within one process group."""

from __future__ import annotations

import sys
from pathlib import Path

from matcha.cli.demo import Demo
from matcha.distributed.launch.environment import worker_transport
from matcha.distributed.train import Network, run_worker
from matcha.plans import Plan
from matcha.training.jobs import Job
from matcha.training.settings import Settings
from matcha.zoo.recipes import Choices, recipe


def main(spec: Path) -> None:
    """Train what the demo's file asks for."""
    demo = Demo.read(spec)
    digits = recipe("digits")
    settings = Settings(
        epochs=demo.epochs,
        schedule=digits.schedule(demo.epochs, demo.learning_rate),
        optimizer=digits.optimizer,
        target_loss=demo.target_loss,
    )
    with worker_transport() as transport:
        for strategy in demo.strategies:
            made = Plan.load(demo.plan_file(strategy))
            job = Job(
                directory=demo.run_directory(strategy),
                task=digits.spec(
                    Choices(
                        num_workers=made.num_workers, batch_size=demo.batch_size, seed=demo.seed
                    )
                ),
                plan=made,
                settings=settings,
                name=strategy,
            )
            run_worker(job, transport, Network(link_mbps=demo.link_mbps))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
