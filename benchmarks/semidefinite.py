"""The planner's own small semidefinite solver against Clarabel, a general cone solver.

    python benchmarks/semidefinite.py            # about a minute; writes benchmarks/results/
    python benchmarks/semidefinite.py --quick    # a smoke test: the smallest two, nothing written

Programs as `recoloring` and `activation` solve them: eq. 5 on Erdős–Rényi graphs of average degree
8 at C_b = 0.5, in the space perpendicular to ones, to a relative gap of 1e-8. Clarabel gets them
through its own interface, without cvxpy. Times are CPU seconds of one program on one thread, the
least of several: `alone`, and in a stack of 32 as the search for decompositions solves them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import clarabel
import numpy as np
from harness import Column, finish, machine, parser, table
from scipy.sparse import csc_matrix

from matcha._numerics.semidefinite import solve
from matcha._numerics.spectra import laplacian, perpendicular_basis
from matcha.matchings import decompose
from matcha.topology import families

SIZES = (8, 16, 31, 64)
STACK = 32
BUDGET = 0.5
REPEATS = 7
SOLVERS = ("clarabel", "alone", "stacked")
Array = np.ndarray[Any, np.dtype[np.float64]]


def program(num_workers: int, seed: int) -> tuple[Array, Array, Array, Array]:
    """A, a, c and b of eq. 5 on a random graph, for `semidefinite.solve` as a stack of one."""
    probability = min(1.0, 8 / (num_workers - 1))
    topology = families.erdos_renyi(num_workers, probability, seed=seed)
    matchings = decompose(topology, seed=0)
    Q = perpendicular_basis(num_workers)
    A = np.stack([Q.T @ laplacian(links, num_workers).toarray() @ Q for links in matchings])
    c = np.ones(len(matchings))
    return A[None], np.zeros((1, 0, len(c))), c[None], np.array([BUDGET * len(c)])


def general(A: Array, c: Array, b: float) -> float:
    """The optimal t by Clarabel: minimise −t over (p, t)."""
    n, k = A.shape[0], A.shape[1]
    rows, columns = np.tril_indices(k)  # Clarabel's triangle, column by column, transposed
    scale = np.where(rows == columns, 1.0, np.sqrt(2.0))
    psd = np.column_stack([-(A[j][rows, columns] * scale) for j in range(n)])
    psd = np.column_stack([psd, np.where(rows == columns, 1.0, 0.0)])
    eye, zero = np.eye(n), np.zeros((n, 1))
    G = np.vstack([psd, np.hstack([-eye, zero]), np.hstack([eye, zero]), [*c, 0.0]])
    h = np.concatenate([np.zeros(len(rows)), np.zeros(n), np.ones(n), [b]])
    q = np.zeros(n + 1)
    q[-1] = -1.0
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.max_threads = 1
    cones = [clarabel.PSDTriangleConeT(k), clarabel.NonnegativeConeT(2 * n + 1)]
    P = csc_matrix((n + 1, n + 1))
    found = clarabel.DefaultSolver(P, q, csc_matrix(G), h, cones, settings).solve()
    return float(found.x[-1])


def seconds(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """CPU seconds of one call: the least of several, each of at least ten milliseconds."""
    call()
    best, number = np.inf, 1
    for _ in range(repeats):
        spent = 0.0
        while spent < 0.01:
            start = time.process_time()
            for _ in range(number):
                call()
            spent = time.process_time() - start
            number = number if spent >= 0.01 else 2 * number
        best = min(best, spent / number)
    return float(best)


def row(num_workers: int) -> dict[str, Any]:
    """One size: both solvers' times, and by how much their optima differ."""
    A, a, c, b = program(num_workers, seed=1)
    theirs = general(A[0], c[0], float(b[0]))
    found = solve(A, a, c, b)
    ours = float(np.linalg.eigvalsh(np.einsum("j,jkl->kl", found.p[0], A[0]))[0])
    many = tuple(np.repeat(part, STACK, axis=0) for part in (A, a, c, b))
    return {
        "workers": num_workers,
        "order": A.shape[-1],
        "variables": A.shape[1],
        "difference": abs(ours - theirs) / theirs,
        "clarabel": seconds(lambda: general(A[0], c[0], float(b[0]))),
        "alone": seconds(lambda: solve(A, a, c, b)),
        "stacked": seconds(lambda: solve(*many), 3) / STACK,
    }


COLUMNS = [
    Column("order", "order", "d"),
    Column("variables", "variables", "d"),
    *(Column(who, lambda row, who=who: 1e3 * row[who], ".3f") for who in SOLVERS),
    Column("× alone", lambda row: row["clarabel"] / row["alone"], ".1f"),
    Column("× stacked", lambda row: row["clarabel"] / row["stacked"], ".1f"),
    Column("difference", "difference", ".1e"),
]


def describe(document: dict[str, Any]) -> str:
    """A line per size."""
    head = "Milliseconds of CPU per program, and how many times faster than Clarabel."
    return f"{head}\n{table(COLUMNS, document['rows'])}"


def main() -> None:
    """Run, print and write."""
    options = parser(__doc__, output="semidefinite")
    options.add_argument("--quick", action="store_true", help="the smallest two, nothing written")
    args = options.parse_args()
    rows = [row(size) for size in (SIZES[:2] if args.quick else SIZES)]
    document = {"rows": rows, "stack": STACK, "clarabel": clarabel.__version__}
    document["machine"] = machine()
    finish(None if args.quick else args.output, document, describe(document))


if __name__ == "__main__":
    main()
