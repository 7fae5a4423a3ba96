"""The search: every strategy, budget, wire and outer step; with a task, the best few tried.

How many iterations a target takes depends on a plan through the disagreement that it leaves, and on
little else; what an iteration takes is known. So every trial of one plan says something of all
others: iterations are taken as a chain of straight lines in the disagreement, from those that exact
averaging needs, and the plan that then looks quickest is tried next, until what is untried looks
slower.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from matcha._numerics import ProgressCallback
from matcha.errors import InputError
from matcha.plans import OuterStep, Plan
from matcha.strategies import Strategy, is_control
from matcha.strategies import plan as make_plan
from matcha.sweeps import make_plans
from matcha.theory import admissible_learning_rate, consensus_error, drift_error
from matcha.topology import Topology
from matcha.topology.families import TopologyLike, as_topology
from matcha.topology.topology import MAX_SECONDS
from matcha.tuning.points import TunedPoint, Tuning
from matcha.tuning.problem import Problem, fewest_iterations

DEFAULT_BUDGETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
DEFAULT_STRATEGIES = ("greedy", "matcha", "vanilla")
DEFAULT_WIRES = ("float32", "modulo:8", "modulo:4", "modulo:3")
"""Not bfloat16, of which modulo:8 is better in half the bytes; not modulo:2 nor low rank, which win
only where hardly anything may be sent."""
MAX_TRIALS = 8
WORTH_A_TRIAL = 1.05
"""A plan that looks up to so much slower than the best that was tried is tried too: guesses err."""
_SLOPE = 0.05  # of the iterations, a unit of disagreement: a first guess, until a trial says more
_PATIENCE = 6.0  # times what exact averaging needs: what takes longer will not be chosen


class Trials(Protocol):
    """Real training: what `matcha.simulation.TaskTrials` does with a task."""

    @property
    def exact_iterations(self) -> float:
        """Iterations that exact averaging takes to the target: nearly the fewest."""

    def __call__(self, plan: Plan, limit: float, rate_factor: float = 1.0) -> float:
        """Iterations until the average model holds the target; infinite if not within a limit.

        Args:
            plan: to train by.
            limit: iterations.
            rate_factor: what the learning rate of exact averaging is multiplied by.
        """


def tune(
    topology: TopologyLike,
    *,
    compute_time: float,
    link_time: float | None = None,
    latency: float = 0.0,
    problem: Problem | None = None,
    strategies: str | Strategy | Sequence[str | Strategy] = DEFAULT_STRATEGIES,
    budgets: float | Sequence[float] = DEFAULT_BUDGETS,
    wires: str | Sequence[str] = DEFAULT_WIRES,
    overlap: bool = False,
    seed: int = 0,
    trials: Trials | None = None,
    max_trials: int = MAX_TRIALS,
    outer: Sequence[OuterStep | None] = (None,),
    rate_factors: Sequence[float] = (1.0,),
    progress: ProgressCallback | None = None,
) -> Tuning:
    """Choose the strategy, budget and wire whose average model reaches a target soonest.

    A budget says how many iterations lie between rounds, so that it is a period too.

    Args:
        topology: As for `matcha.plan`, with link times where they are known.
        compute_time: Seconds that a worker computes per iteration.
        link_time: Seconds of one matching that exchanges whole float32 models; may be left out
            where the topology has link times.
        latency: Those of `link_time` that a message of any size takes: no wire saves them.
        problem: What training looks like; by default a smooth loss of unit noise.
        strategies: As for `matcha.plan`. Controls, as `silent`, are shown and never chosen.
        budgets: Values of C_b to try.
        wires: Names as for `matcha.plan`: what messages may hold.
        overlap: Whether the exchange runs while the gradient is computed.
        seed: As for `matcha.plan`.
        trials: Trains, as `matcha.simulation.TaskTrials` does; None trusts the theory.
        max_trials: Plans to train at most, beside exact averaging.
        outer: Outer steps to try after rounds, None for none; strategies that have their own keep
            it. They need trials: the theory knows nothing of them.
        rate_factors: Multiples of the learning rate at which the best plan is tried, too.
        progress: Called with (done, total, "plans and trials") after each plan or trial.

    Returns:
        Every point with its time, the best one, and its plan.

    Raises:
        InputError: A time is not positive, link times are missing, or nothing reaches the target.

    >>> from matcha.topology import families
    >>> found = tune(families.ring(8), compute_time=1.0, link_time=0.001, wires=["float32"],
    ...     strategies=["vanilla", "periodic"], budgets=[0.1, 0.5])
    >>> found.best.strategy, found.best.budget
    ('vanilla', 1.0)
    """
    topology, problem = as_topology(topology), problem or Problem()
    network, unit_seconds = _network(topology, compute_time, link_time, latency)
    if trials is None and (tuple(outer) != (None,) or tuple(rate_factors) != (1.0,)):
        raise InputError(
            "theory knows nothing of outer steps, and says itself which rate it means: give trials "
            "of a task, or leave outer steps and rate factors out."
        )
    if not outer or any(not 0 < factor < math.inf for factor in rate_factors):
        raise InputError("outer steps need one choice or more, and rate factors are positive.")
    kind = "plans" if trials is None else "plans and trials at most"
    num_trials = 0 if trials is None else max_trials

    def show(done: int, num_plans: int, _: str = "") -> None:
        if progress is not None:
            progress(done, num_plans + num_trials, kind)

    plans = make_plans(network, strategies, budgets, wires, progress=show, seed=seed)
    if not plans or max_trials < 1:
        raise InputError("tuning needs a strategy, a budget, a wire and at least one trial.")
    points: list[TunedPoint] = []
    for plan in plans:
        seconds = plan.expected_comm_time * unit_seconds
        point = predict(plan, problem, compute_time, seconds, overlap=overlap)
        steps = (plan.outer,) if plan.outer is not None else outer
        points += [replace(point, outer=o, plan=replace(plan, outer=o)) for o in steps]
    if trials is not None:
        points = _try_best(
            points,
            [_disagreement_of(point, problem) for point in points],
            trials,
            max_trials,
            rate_factors,
            lambda tried: show(len(plans) + tried, len(plans)),
        )
    best = _best(points)
    return Tuning(
        topology=topology,
        problem=problem,
        compute_time=compute_time,
        overlap=overlap,
        points=tuple(points),
        best=best,
        plan=replace(best.plan, notes=(*best.plan.notes, *_notes(best))),
    )


def predict(
    plan: Plan, problem: Problem, compute_time: float, comm_seconds: float, *, overlap: bool = False
) -> TunedPoint:
    """When a plan is predicted to reach a problem's target, at the best learning rate for it."""
    noise = disagreement(plan)
    drift = drift_error(plan.process) if problem.dissimilarity > 0 else 0.0
    if drift is None:  # too large for the exact error: Theorem 2's bound
        drift = plan.rho / (1 - math.sqrt(plan.rho)) ** 2
    drift *= 1 / (1 - plan.wire.residual)
    iterations, rate = fewest_iterations(problem, plan.num_workers, noise, drift)
    exact_rate = fewest_iterations(problem, plan.num_workers, 0.0, 0.0)[1]
    return TunedPoint(
        strategy=plan.strategy,
        budget=plan.budget,
        wire=plan.wire.name,
        rho=plan.rho,
        consensus_error=noise,
        drift_error=drift,
        comm_seconds=comm_seconds,
        iteration_seconds=(
            max(compute_time, comm_seconds) if overlap else compute_time + comm_seconds
        ),
        learning_rate=rate,
        rate_factor=rate / exact_rate if exact_rate else None,
        iterations=iterations,
        proved=rate <= admissible_learning_rate(min(plan.rho, 1 - 1e-12), problem.smoothness),
        plan=plan,
    )


def disagreement(plan: Plan) -> float:
    """A plan's consensus error, with what its wire leaves of each meeting's difference.

    Where the network is too large for the exact error, Theorem 2's bound.
    """
    found = consensus_error(plan.process)
    if found is None:
        rho = min(plan.rho, 1 - 1e-9)
        found = rho / (1 - rho)
    return found / (1 - plan.wire.residual)


def small_messages(topology: Topology, budget: float, seed: int = 0) -> Plan:
    """Greedy with the messages, smaller than whole, that leave least disagreement at a budget."""
    # Within one budget all have one time per iteration, whatever it is in seconds.
    wires = DEFAULT_WIRES[1:]
    return min(
        (make_plan(topology, budget, "greedy", seed, wire=w) for w in wires), key=disagreement
    )


def _network(
    topology: Topology, compute_time: float, link_time: float | None, latency: float
) -> tuple[Topology, float]:
    """The topology to plan for, and the seconds of its unit of time."""
    if not 0 < compute_time <= MAX_SECONDS:
        raise InputError(f"the compute time is {compute_time!r}, but it is positive seconds.")
    if topology.link_times is not None:
        if link_time is not None or latency:
            raise InputError(
                "the topology has its own link times: leave link_time and latency out."
            )
        return topology, 1.0
    if link_time is None:
        raise InputError("the topology has no link times: give link_time, seconds of a matching.")
    if not 0 < link_time <= MAX_SECONDS:
        raise InputError(f"the link time is {link_time!r}, but it is positive seconds.")
    if not 0 <= latency < link_time:
        raise InputError(
            f"the latency is {latency!r}, but it is a part of the link time, {link_time!r} seconds."
        )
    if not latency:
        return topology, link_time
    number = len(topology.links)
    return topology.with_link_times([link_time] * number, latencies=[latency] * number), 1.0


def _disagreement_of(point: TunedPoint, problem: Problem) -> float:
    """What a plan leaves of noise and of heterogeneous data, in units of the noise's."""
    noise, unlike = problem.gradient_variance, problem.dissimilarity
    return (noise * point.consensus_error + unlike * point.drift_error) / ((noise + unlike) or 1.0)


def _best(points: Sequence[TunedPoint]) -> TunedPoint:
    """The soonest, of those that were tried where any was; a control is never it."""
    able = [point for point in points if not is_control(point.strategy)]
    tried = [point for point in able if point.tried]
    best = min(tried or able, key=lambda point: point.seconds, default=None)
    if best is None or not math.isfinite(best.seconds):
        raise InputError(
            "no strategy reaches the target at any learning rate: raise the target or the budgets."
            if not tried
            else "no plan that was tried reached the target: raise it, or the budgets."
        )
    return best


def _notes(best: TunedPoint) -> list[str]:
    """What the best plan's file says of how it was chosen."""
    if best.tried:
        at = f" at {best.rate_factor:.2g} of the learning rate" if best.rate_factor != 1 else ""
        return [f"tuned: a trial reached the target after {best.iterations:.0f} iterations{at}."]
    notes = [f"tuned: predicted to reach the target in {best.seconds:.4g} s."]
    if best.outer is not None:
        notes.append(
            "the prediction knows nothing of outer steps: tune with a task, which tries them."
        )
    return notes


# -- trials ----------------------------------------------------------------------------------------


def _try_best(
    points: Sequence[TunedPoint],
    disagreements: Sequence[float],
    trials: Trials,
    max_trials: int,
    rate_factors: Sequence[float],
    on_trial: Callable[[int], object],
) -> list[TunedPoint]:
    """The points with measured iterations where they were tried, and inferred ones elsewhere.

    The best of them is tried at other learning rates too, outwards from 1 until they get worse.
    """
    exact, best = trials.exact_iterations, math.inf
    known, measured = [(0.0, exact)], dict[int, float]()
    while len(measured) < max_trials:
        guesses = {
            n: infer_iterations(disagreements[n], known) * point.iteration_seconds
            for n, point in enumerate(points)
            if n not in measured and math.isfinite(disagreements[n])
        }
        place = min(guesses, key=guesses.__getitem__, default=None)
        if place is None or guesses[place] >= WORTH_A_TRIAL * best:
            break
        point = points[place]
        limit = min(_PATIENCE * exact, best / point.iteration_seconds)
        needed = measured[place] = trials(point.plan, limit)
        best = min(best, needed * point.iteration_seconds)
        if point.outer is None:  # with outer steps it is no matter of disagreement alone
            # What was not reached within the limit takes longer, by an unknown amount.
            lesson = needed if math.isfinite(needed) else 1.5 * limit
            known.append((disagreements[place], lesson))
        on_trial(len(measured))
    found = []
    for n, point in enumerate(points):
        tried = n in measured
        needed = measured[n] if tried else infer_iterations(disagreements[n], known)
        factor = 1.0 if tried else None
        found.append(
            replace(point, iterations=needed, learning_rate=None, rate_factor=factor, tried=tried)
        )
    if math.isfinite(best):
        place = min(measured, key=lambda n: found[n].seconds)
        found[place] = _at_best_rate(found[place], trials, rate_factors)
    return found


def _at_best_rate(point: TunedPoint, trials: Trials, rate_factors: Sequence[float]) -> TunedPoint:
    """A plan that was tried, at the best multiple of the learning rate."""
    larger = sorted(f for f in rate_factors if f > 1)
    smaller = sorted((f for f in rate_factors if f < 1), reverse=True)
    for direction in (larger, smaller):
        for factor in direction:
            needed = trials(point.plan, point.iterations, rate_factor=factor)
            if not needed < point.iterations:
                break
            point = replace(point, iterations=needed, rate_factor=factor)
        if point.rate_factor != 1.0:
            break  # where a larger rate is better, a smaller one is not
    return point


def infer_iterations(disagreement: float, known: Sequence[tuple[float, float]]) -> float:
    """Iterations by straight lines between what is known, and beyond it by the whole chain's slope.

    >>> infer_iterations(2.0, [(0.0, 100.0)])
    110.0
    >>> infer_iterations(1.0, [(0.0, 100.0), (2.0, 160.0)])
    130.0
    """
    if not math.isfinite(disagreement):
        return math.inf
    left, iterations = np.array(sorted(known, key=lambda pair: pair[0]), dtype=float).T
    if disagreement < left[-1]:
        return float(np.interp(disagreement, left, iterations))
    slope = least = _SLOPE * iterations[0]
    if left[-1] > 0:  # not the last line's slope: two neighbours differ by luck too
        slope = max((iterations[-1] - iterations[0]) / left[-1], least / 10)
    return float(iterations[-1] + slope * (disagreement - left[-1]))
