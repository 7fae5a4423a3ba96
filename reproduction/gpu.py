"""The paper's training runs at full scale on one GPU, in the time there is.

    python -m reproduction.gpu cifar10 --data /tmp/data --plans .carry/plans \
        --output $OUT --seconds 480

Runs a group's trials in order of importance. The number of epochs is what lets the whole list fit
into --list-seconds (at least --min-epochs); the learning rate is tuned on vanilla first. Each
result is a line of OUTPUT/GROUP.jsonl as soon as it is known. What was chosen and done is kept in
--state, and so is a trial that --seconds cut short: a later call on the same machine goes on where
this one ended. --only and --seeds pick trials of the list.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from matcha.plans import Plan
from matcha.records import Record
from matcha.simulation import SGD, Engine, Execution, Settings, Simulation
from matcha.zoo.recipes import Choices, Recipe, recipe
from reproduction.learning_rates import best_rate, tuning_loss
from reproduction.paper import Group, group
from reproduction.trials import Result, Trial, result_of

_LEAST_SECONDS = 40.0
"""A trial is not begun with less time than this left."""
_SAVING = 15.0
"""Set aside for a checkpoint."""


@dataclass
class State:
    """What a group's earlier calls chose and did."""

    path: Path
    epochs: int | None = None
    learning_rate: float | None = None
    losses: dict[str, float] = field(default_factory=dict)
    """Vanilla's final training loss by learning rate."""
    done: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> State:
        """The state in a file; a new one if there is none."""
        return cls(path=path, **json.loads(path.read_text())) if path.exists() else cls(path=path)

    def write(self) -> None:
        """Keep the state for a later call."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        document = {k: v for k, v in vars(self).items() if k != "path"}
        self.path.write_text(json.dumps(document))


@dataclass
class Runner:
    """One group on one device."""

    args: argparse.Namespace
    group: Group
    recipe: Recipe
    choices: Choices
    execution: Execution
    engine: Engine
    state: State
    deadline: float
    epoch_seconds: float = math.inf
    evaluation_seconds: float = 0.0

    def settings(self, epochs: int, rate: float) -> Settings:
        """How a trial is trained."""
        return Settings(
            epochs=epochs,
            schedule=self.recipe.schedule(epochs, rate),
            optimizer=self.engine.optimizer,
            evaluate_every=max(1, epochs // self.args.evaluations),
            delays=self.group.delays,
            execution=self.engine.execution,
        )

    def engine_of(self, seed: int) -> Engine:
        """An engine under a seed: of weights, order and partition alike."""
        if self.engine.task.seed != seed:
            task = self.recipe.task(replace(self.choices, seed=seed))
            self.engine = Engine(task, self.recipe.optimizer, execution=self.execution)
        return self.engine

    def plan(self, trial: Trial) -> Plan:
        """The trial's plan, made beforehand."""
        return Plan.load(self.args.plans / trial.plan_file)

    def probe(self) -> None:
        """How long an epoch and an evaluation take; captures the graphs on the way."""
        plan = self.plan(self.group.trials[0])
        settings = replace(self.settings(2, self.recipe.learning_rate), evaluate_every=2)
        simulation = Simulation(self.engine.task, plan, settings, engine=self.engine)
        epochs = iter(simulation)
        next(epochs)
        simulation.evaluate()
        started = time.perf_counter()
        simulation.evaluate()
        self.evaluation_seconds = time.perf_counter() - started
        started = time.perf_counter()
        record = next(epochs)  # evaluates too
        self.epoch_seconds = time.perf_counter() - started - self.evaluation_seconds
        print(f"probe: workers' own loss {record.worker_loss:.4f}", flush=True)
        print(
            f"{self.epoch_seconds:.2f} s an epoch, {self.evaluation_seconds:.2f} s an evaluation",
            flush=True,
        )

    def epochs_of(self, trial: Trial) -> int:
        """How long a trial is trained."""
        assert self.state.epochs is not None
        return round(self.state.epochs * trial.stretch)

    def choose_epochs(self) -> int:
        """As many as let the whole list fit."""
        tuning = min(3, len(self.group.rates)) - 1
        number = sum(trial.stretch for trial in self.group.trials) + tuning
        each = self.args.list_seconds / number
        per_epoch = self.epoch_seconds
        epochs = int((each - self.args.evaluations * self.evaluation_seconds) / per_epoch)
        fewest, most = int(self.args.min_epochs), int(self.args.max_epochs)
        return max(fewest, min(most, epochs))

    def run(self, trial: Trial, rate: float, key: str) -> Result | None:
        """One trial, its result written; None if it failed or is to be gone on with later."""
        if time.perf_counter() + _LEAST_SECONDS > self.deadline:
            print(f"no time for {key}", flush=True)
            return None
        try:
            result = self._train(trial, rate, self.args.state / key.replace(" ", "_"))
        except Exception:
            print(f"{key} failed:\n{traceback.format_exc()}", flush=True)
            return None
        if result is None:
            return None
        with (self.args.output / f"{self.group.name}.jsonl").open("a") as file:
            file.write(result.to_line() + "\n")
        self.state.done.append(key)
        self.state.write()
        last = result.records[-1]
        print(
            f"{key}: loss {last.train_loss}, own {last.worker_loss}, test {last.test_loss} "
            f"{last.test_accuracy}, consensus {last.consensus_distance:.4g} "
            f"({last.predicted_consensus} foreseen), {last.comm_units:.0f} units, "
            f"{result.seconds:.1f} s",
            flush=True,
        )
        return result

    def _train(self, trial: Trial, rate: float, place: Path) -> Result | None:
        """Train a trial, going on where an earlier call stopped; None where this one must stop."""
        engine = self.engine_of(trial.seed)
        settings = self.settings(self.epochs_of(trial), rate)
        simulation = Simulation(engine.task, self.plan(trial), settings, engine=engine)
        checkpoint, kept = place.with_suffix(".pt"), place.with_suffix(".json")
        records: list[Record] = []
        before = 0.0
        if checkpoint.exists() and kept.exists():
            simulation.load(checkpoint)
            earlier = Result.from_line(kept.read_text())
            records, before = list(earlier.records), earlier.seconds
            print(f"{place.name} goes on after epoch {simulation.progress.epoch}", flush=True)
        named, started = replace(trial, learning_rate=rate), time.perf_counter()
        for record in simulation:
            records.append(record)
            is_late = time.perf_counter() + 2 * self.epoch_seconds + _SAVING > self.deadline
            if is_late and not simulation.is_over:
                seconds = before + time.perf_counter() - started
                kept.write_text(result_of(named, simulation, records, seconds).to_line())
                simulation.save(checkpoint)
                print(f"{place.name} stops after epoch {simulation.progress.epoch}", flush=True)
                return None
        for path in (checkpoint, kept):
            path.unlink(missing_ok=True)
        seconds = before + time.perf_counter() - started
        return result_of(named, simulation, records, seconds)

    def tune(self) -> None:
        """Run vanilla with the candidate rates; the lowest final training loss wins."""
        vanilla = self.group.trials[0]

        def loss(rate: float) -> float:
            if str(rate) not in self.state.losses:
                result = self.run(vanilla, rate, f"{_key(vanilla)} lr {rate:g}")
                if result is None:
                    raise TimeoutError
                self.state.losses[str(rate)] = tuning_loss(result)
                self.state.write()
            return self.state.losses[str(rate)]

        try:
            best = best_rate(self.group.rates, loss)
        except TimeoutError:
            return
        self.state.learning_rate = best
        self.state.done.append(_key(vanilla))
        self.state.write()
        print(f"learning rate {best:g} of {self.state.losses}", flush=True)


def _key(trial: Trial) -> str:
    return f"{trial.task} {trial.topology} {trial.label} seed {trial.seed}"


def main() -> None:
    """Parse, then run the group's trials."""
    started = time.perf_counter()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("group")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--plans", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--state", type=Path, default=Path("/tmp/matcha-state"))
    parser.add_argument("--seconds", type=float, default=480, help="of this call, start included")
    parser.add_argument(
        "--list-seconds", type=float, help="for the whole list; default: this call's"
    )
    parser.add_argument("--min-epochs", type=int, default=6)
    parser.add_argument("--max-epochs", type=int, default=200)
    parser.add_argument("--epochs", type=int, help="instead of the group's, or what fits")
    parser.add_argument("--only", nargs="+", help="labels such as 'greedy 0.1'; default: all")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: all of the group's")
    parser.add_argument("--evaluations", type=int, default=6, help="a run")
    parser.add_argument("--learning-rate", type=float, help="instead of tuning")
    parser.add_argument("--rates", type=float, nargs="+", help="instead of the group's candidates")
    parser.add_argument("--probe", action="store_true", help="only time an epoch")
    parser.add_argument("--plain", action="store_true", help="SGD without momentum")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--model")
    parser.add_argument("--num-train", type=int)
    parser.add_argument("--num-test", type=int)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    chosen = group(args.group)
    wanted = [
        trial
        for trial in chosen.trials
        if (not args.only or trial.label in args.only)
        and (not args.seeds or trial.seed in args.seeds)
    ]
    args.model = args.model or chosen.model
    args.epochs = args.epochs or chosen.epochs
    args.state.mkdir(parents=True, exist_ok=True)
    if args.rates:
        chosen = replace(chosen, rates=tuple(args.rates))
    how = recipe(chosen.task)
    if args.plain:
        decay = getattr(how.optimizer, "weight_decay", 0.0)
        how = replace(how, optimizer=SGD(weight_decay=decay))
    choices = Choices(
        num_workers=chosen.num_workers,
        data=args.data,
        model=args.model,
        num_train=args.num_train,
        num_test=args.num_test,
    )
    execution = Execution(
        device=args.device,
        precision="bfloat16" if args.device == "cuda" else "float32",
        streams=args.streams,
        compile=args.compile,
    )
    runner = Runner(
        args=args,
        group=chosen,
        recipe=how,
        choices=choices,
        execution=execution,
        engine=Engine(how.task(choices), how.optimizer, execution=execution),
        state=State.read(args.state / f"{chosen.name}.json"),
        deadline=started + args.seconds,
    )
    print(f"ready after {time.perf_counter() - started:.1f} s", flush=True)
    runner.probe()
    if args.probe:
        timed = {
            "group": chosen.name,
            "model": args.model or how.model,
            "epoch_seconds": runner.epoch_seconds,
            "evaluation_seconds": runner.evaluation_seconds,
            "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
        }
        (args.output / f"probe_{timed['model']}.json").write_text(json.dumps(timed) + "\n")
        return
    if args.list_seconds is None:
        args.list_seconds = runner.deadline - time.perf_counter()
    if runner.state.epochs is None:
        runner.state.epochs = args.epochs or runner.choose_epochs()
    if args.learning_rate is None and len(chosen.rates) == 1:
        args.learning_rate = chosen.rates[0]
    if args.learning_rate is not None:
        runner.state.learning_rate = args.learning_rate
    runner.state.write()
    print(f"{runner.state.epochs} epochs a trial", flush=True)
    if runner.state.learning_rate is None:
        runner.tune()
    rate: Any = runner.state.learning_rate
    if rate is not None:
        for trial in wanted:
            if _key(trial) not in runner.state.done:
                runner.run(trial, rate, _key(trial))
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(f"peak memory {peak:.1f} GiB", flush=True)
    print(f"ended after {time.perf_counter() - started:.1f} s; {runner.state.done}", flush=True)


if __name__ == "__main__":
    main()
