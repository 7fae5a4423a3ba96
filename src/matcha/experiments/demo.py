"""The demo: the same training by seven strategies, on real processes over slow links.

Eight processes start once and train scikit-learn's digits four times over, each strategy to the
same training loss. Links are slowed down by emulation; everything else is real.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from matcha.errors import InputError
from matcha.plans import Plan
from matcha.records import COMMAND_VARIABLE, Record, follow, invoked
from matcha.strategies import COMPARED, has_budget, plan
from matcha.topology import families

_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """What the demo trains, and on what network."""

    directory: Path
    topology: str = "paper:er8"
    strategies: tuple[str, ...] = COMPARED
    budget: float = 0.2
    """C_b of every strategy but vanilla."""
    link_mbps: float = 2.5
    """The speed that links are emulated to have."""
    target_loss: float = 0.025
    epochs: int = 20
    """Give up on the target after so many."""
    learning_rate: float | None = None
    batch_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("link_mbps", "target_loss", "epochs"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name} must be positive, not {getattr(self, name):g}.")
        if not self.strategies:
            raise InputError("the demo needs at least one strategy.")

    def run_directory(self, strategy: str) -> Path:
        """Where a strategy's run is recorded."""
        return self.directory / strategy

    def plan_file(self, strategy: str) -> Path:
        """Where a strategy's plan waits for the workers."""
        return self.directory / "plans" / f"{strategy}.json"


def make_plans(demo: Demo) -> dict[str, Plan]:
    """Plan every strategy and leave the plans where the workers find them."""
    topology = families.parse(demo.topology)
    plans = {}
    for strategy in demo.strategies:
        budget = demo.budget if has_budget(strategy) else 1.0
        plans[strategy] = plan(topology, budget, strategy, demo.seed)
        demo.plan_file(strategy).parent.mkdir(parents=True, exist_ok=True)
        plans[strategy].save(demo.plan_file(strategy))
    return plans


def run_demo(
    demo: Demo, num_workers: int, on_record: Callable[[str, Record], None] | None = None
) -> None:
    """Start the workers, follow them to the end, and leave none behind, whatever happens.

    Args:
        demo: What to train; its plans are made already.
        num_workers: How many processes.
        on_record: Called with a strategy and each of its records as they come.

    Raises:
        WorkerError: A worker failed; its last words are in the message.
        ExchangeError: A worker was lost.
    """
    from matcha.distributed.launch.launcher import launch

    spec = demo.directory / "demo.json"
    spec.write_text(json.dumps(asdict(demo), default=str) + "\n", encoding="utf-8")
    followers = {strategy: follow(demo.run_directory(strategy)) for strategy in demo.strategies}

    def show(ended: Callable[[], bool]) -> None:
        while not ended():
            _follow(followers, on_record)
            time.sleep(_POLL_SECONDS)

    launch(
        ["-m", "matcha.experiments.demo", str(spec)],
        num_workers,
        environment={COMMAND_VARIABLE: invoked() or "matcha demo"},
        logs=demo.directory / "logs",
        meanwhile=show,
    )
    _follow(followers, on_record)


def _follow(
    followers: Mapping[str, Iterator[list[Record]]],
    on_record: Callable[[str, Record], None] | None,
) -> None:
    for strategy, records in followers.items():
        for record in next(records):
            if on_record is not None:
                on_record(strategy, record)


def worker_main(spec: Path) -> None:
    """One worker of the demo: every strategy in turn, in one process group."""
    from matcha.distributed.launch.environment import worker_transport
    from matcha.distributed.worker import Network, run_worker
    from matcha.training.jobs import Job
    from matcha.training.settings import Settings
    from matcha.zoo.recipes import Choices, recipe

    document = json.loads(spec.read_text(encoding="utf-8"))
    document["strategies"] = tuple(document["strategies"])
    document["directory"] = Path(document["directory"])
    demo = Demo(**document)
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
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    worker_main(Path(sys.argv[1]))
