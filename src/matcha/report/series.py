"""Series: the curves of a run, thinned to what a page can show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from matcha.records import MODEL_FIGURES, Record, Run

METRICS = (*MODEL_FIGURES, "gradient_norm", "gradient_bound")
AXES = ("iteration", "epoch", "time", "comm_units", "megabytes_sent")


def thin(x: npt.ArrayLike, y: npt.ArrayLike, limit: int) -> npt.NDArray[np.int64]:
    """The positions of at most `limit` points that keep a curve's shape.

    Largest-triangle-three-buckets (Steinarsson, 2013): of each bucket, keep the point that spans
    the largest triangle with the point kept before it and the mean of the bucket after it. The
    first and last points always stay, and so does a lone spike.

    >>> thin(range(1000), [0.0] * 500 + [9.0] + [0.0] * 499, 10).tolist().count(500)
    1
    """
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    count = len(x)
    if count <= limit or limit < 3:
        return np.arange(count)
    edges = np.linspace(1, count - 1, limit - 1).astype(int)
    kept = [0]
    for bucket in range(limit - 2):
        start, stop = edges[bucket], edges[bucket + 1]
        after = slice(stop, edges[bucket + 2] if bucket + 2 < len(edges) else count)
        a, (cx, cy) = kept[-1], (x[after].mean(), y[after].mean())
        area = np.abs((x[a] - cx) * (y[start:stop] - y[a]) - (x[a] - x[start:stop]) * (cy - y[a]))
        kept.append(start + int(np.argmax(area)))
    return np.array([*kept, count - 1])


def curves(records: Sequence[Record], limit: int = 400) -> dict[str, dict[str, list[Any]]]:
    """Each metric that the records hold: its values `y` beside every horizontal axis."""
    found = {}
    for metric in METRICS:
        known = [r for r in records if getattr(r, metric) is not None]
        # A run that diverges stays on the page: its curve ends at the last finite value.
        finite = [r for r in known if math.isfinite(getattr(r, metric))]
        if not finite:
            continue
        y = [float(getattr(r, metric)) for r in finite]
        kept = thin([r.iteration for r in finite], y, limit)
        columns: dict[str, list[Any]] = {
            axis: [short(getattr(finite[i], axis)) for i in kept] for axis in AXES
        }
        found[metric] = {**columns, "y": [short(y[i]) for i in kept]}
    return found


def mean_curves(runs: Sequence[Run], limit: int = 400) -> dict[str, dict[str, list[Any]]]:
    """The curves of runs that differ in their seed: means, with `low` and `high` a deviation off.

    Only iterations that every run recorded are kept; one run has its curves as they are.
    """
    if len(runs) == 1:
        return curves(runs[0].records, limit)
    found = {}
    for metric in METRICS:
        each = [{r.iteration: r for r in run.records if _finite(r, metric)} for run in runs]
        shared = sorted(set.intersection(*(set(records) for records in each)))
        if not shared:
            continue
        y = np.array([[getattr(rs[k], metric) for rs in each] for k in shared], dtype=float)
        mean, spread = y.mean(axis=1), y.std(axis=1, ddof=1)
        kept = thin(shared, mean, limit)
        columns: dict[str, list[Any]] = {
            axis: [_mean([getattr(rs[shared[i]], axis) for rs in each]) for i in kept]
            for axis in AXES
        }
        # On logarithmic scales a band must not reach zero.
        low = np.maximum(mean - spread, mean / 10)
        bands = {"y": mean, "low": low, "high": mean + spread}
        found[metric] = columns | {
            name: [short(float(line[i])) for i in kept] for name, line in bands.items()
        }
    return found


def _mean(values: Sequence[float | None]) -> float | int | None:
    """The mean of all; None where one is not known."""
    known = [value for value in values if value is not None]
    return short(float(np.mean(known))) if len(known) == len(values) else None


def _finite(record: Record, metric: str) -> bool:
    value = getattr(record, metric)
    return value is not None and math.isfinite(value)


def short(value: float | None, digits: int = 5) -> float | int | None:
    """A number with few digits, since a page is read and not computed with; None if not finite.

    >>> short(0.123456789), short(2.0), short(float("nan"))
    (0.12346, 2, None)
    """
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
