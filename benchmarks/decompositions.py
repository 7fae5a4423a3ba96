"""How much the decomposition matters: ρ over ways to split the same links, at the same time.

    python benchmarks/decompositions.py     # about three minutes; writes benchmarks/results/

Plans the paper's five graphs at C_b = 0.5 with the authors' matchings and with ours at each effort.
Nothing is timed: searches count steps, so the numbers are the same on every machine.
"""

from __future__ import annotations

import json

from parts import outcome

import matcha
from matcha.strategies import Matcha

GRAPHS = ("er8", "geometric16-d5", "geometric16-d10", "geometric16-d13", "er16")
EFFORTS = ("none", "default", "high")
BUDGET = 0.5
RESULT = outcome.RESULTS / "decompositions.json"


def main() -> None:
    """Plan, print one table, write the result."""
    rows = []
    print(f"{'graph':<18}{'authors':>10}" + "".join(f"{effort:>10}" for effort in EFFORTS))
    for graph in GRAPHS:
        topology = matcha.families.paper(graph)
        theirs = matcha.plan(topology, BUDGET, matchings=matcha.families.paper_matchings(graph))
        ours = {
            effort: matcha.plan(topology, BUDGET, Matcha(effort=effort)).rho for effort in EFFORTS
        }
        rho = {"authors": theirs.rho, **ours}
        print(f"{graph:<18}" + "".join(f"{value:>10.4f}" for value in rho.values()), flush=True)
        rows.append({"graph": graph, "rho": {name: round(v, 6) for name, v in rho.items()}})
    document = {
        "command": "python benchmarks/decompositions.py",
        "version": matcha.__version__,
        "budget": BUDGET,
        "rows": rows,
    }
    RESULT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
