"""How much the decomposition matters: ρ over ways to split the same links, at the same time.

    python benchmarks/decompositions.py     # about three minutes; writes benchmarks/results/

Plans the paper's five graphs at C_b = 0.5 with the authors' matchings and with ours at each effort.
Nothing is timed: searches count steps, so the numbers are the same on every machine.
"""

from __future__ import annotations

from typing import Any

from harness import Column, finish, parser, table

import matcha
from matcha.strategies import Matcha

GRAPHS = ("er8", "geometric16-d5", "geometric16-d10", "geometric16-d13", "er16")
EFFORTS = ("none", "default", "high")
BUDGET = 0.5


COLUMNS = [
    Column("graph", "graph"),
    *(Column(who, lambda row, who=who: row["rho"][who], ".4f") for who in ("authors", *EFFORTS)),
]


def describe(document: dict[str, Any]) -> str:
    """ρ per graph, by the authors' decomposition and by ours."""
    return table(COLUMNS, document["rows"])


def main() -> None:
    """Plan, print one table, write the result."""
    output = parser(__doc__, output="decompositions").parse_args().output
    rows = []
    for graph in GRAPHS:
        topology = matcha.families.paper(graph)
        theirs = matcha.plan(topology, BUDGET, matchings=matcha.families.paper_matchings(graph))
        rho = {"authors": theirs.rho}
        for effort in EFFORTS:
            rho[effort] = matcha.plan(topology, BUDGET, Matcha(effort=effort)).rho
        rows.append({"graph": graph, "rho": {name: round(v, 6) for name, v in rho.items()}})
    document = {
        "command": "python benchmarks/decompositions.py",
        "version": matcha.__version__,
        "budget": BUDGET,
        "rows": rows,
    }
    finish(output, document, describe(document))


if __name__ == "__main__":
    main()
