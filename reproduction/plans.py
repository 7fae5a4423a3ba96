"""Write the plans of the full-scale runs, for a machine that cannot plan itself.

    python -m reproduction.plans .carry/plans

On the paper's graphs `matcha` and `periodic` use the authors' own decomposition, as the paper did.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matcha
from reproduction.campaign import plan_of
from reproduction.paper import GROUPS


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    for group in GROUPS.values():
        for trial in group.trials:
            path = args.output / trial.plan_file
            if path.exists():
                continue
            try:
                plan = plan_of(trial)
            except matcha.MatchaError as error:
                print(f"{path.name}: {error}")
                continue
            plan.save(path)
            print(f"{path.name}: rho {plan.rho:.4f}, consensus {plan.consensus_error:.3f}")


if __name__ == "__main__":
    main()
