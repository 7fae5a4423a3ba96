"""Plants one wrong line at a time, and says whether the tests notice.

    python tools/plant_defects.py                    # all, each with the tests of its subject
    python tools/plant_defects.py mixing rounds      # those of some modules
    python tools/plant_defects.py --all-tests rounds # with all of `make test`'s tests

The same tests run first without a defect: what fails then would catch anything.
Each defect is what a maintainer would fear: a sign, an index off by one, a state that is not
restored, a swapped role, a timeout that is lost. It is planted in a copy of the repository.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from shutil import copy2

ROOT = Path(__file__).parent.parent
SOURCE = Path("src/matcha")


@dataclass(frozen=True, slots=True)
class Defect:
    """A line of a module of src/matcha as it is and as it must not be, and the tests of it."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> str:
        """Plant it below a root; returns the module's text as it was.

        Raises:
            ValueError: The line is not there, or more than once.
        """
        path = root / SOURCE / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {self.old!r} {text.count(self.old)} times, not once")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")
        return text


def _defect(file: str, old: str, new: str, *tests: str) -> Defect:
    return Defect(file, old, new, tests)


DEFECTS = (
    _defect(
        "_io/__init__.py",
        "if checksum is not None and checksum != fingerprint(document):",
        "if checksum is None and checksum != fingerprint(document):",
        "_io", "plans/test_files.py",
    ),
    _defect(
        "_io/keys.py",
        "context.verify_mode = ssl.CERT_REQUIRED",
        "context.verify_mode = ssl.CERT_NONE",
        "_io/test_keys.py", "distributed/links",
    ),
    _defect(
        "_numerics/spectra.py",
        "values = np.concatenate([-w, -w, w, w])",
        "values = np.concatenate([-w, -w, w, -w])",
        "_numerics",
    ),
    _defect(
        "topology/families.py",
        "(r + 1) % rows * columns + c):",
        "(r + 1) % columns * columns + c):",
        "topology",
    ),
    _defect(
        "timing.py",
        "return budget * sum(self.costs(matchings))",
        "return sum(self.costs(matchings))",
        "test_timing.py", "test_activation.py",
    ),
    _defect(
        "matchings.py",
        "self.partner[i][color], self.partner[j][color] = j, i",
        "self.partner[i][color], self.partner[j][color] = i, j",
        "test_matchings.py",
    ),
    _defect(
        "activation.py",
        "p = np.clip((limit - spent_before) / costs[order], 0.0, 1.0)",
        "p = np.clip(limit / costs[order], 0.0, 1.0)",
        "test_activation.py",
    ),
    _defect(
        "schedules.py",
        "heads = _random_bits(self.seed, k, size, len(self.coins)) < self._thresholds",
        "heads = _random_bits(self.seed, k + 1, size, len(self.coins)) < self._thresholds",
        "test_schedules.py",
    ),
    _defect(
        "rounds.py",
        "                    source, taken = i, w",
        "                    source, taken = j, w",
        "test_rounds.py",
    ),
    _defect(
        "mixing.py",
        "2.0 * (p * (1.0 - p))[owner] * w**2)",
        "(p * (1.0 - p))[owner] * w**2)",
        "test_mixing.py",
    ),
    _defect(
        "theory/cycles.py",
        "        X += p * (mixed - before)\n    return X",
        "        X += mixed - before\n    return X",
        "theory",
    ),
    _defect(
        "theory/steady_state.py",
        "source = noise + C + C.T",
        "source = noise + C",
        "theory",
    ),
    _defect(
        "wires/modulo.py",
        "return _sides(y, factor).mul_(sign)",
        "return _sides(y, factor)",
        "wires",
    ),
    _defect(
        "plans/staged.py",
        "self.levels[stage.level].round(k - stage.start)",
        "self.levels[stage.level].round(k)",
        "plans",
    ),
    _defect(
        "plans/events.py",
        "return at <= k and (until is None or k < until)",
        "return at <= k and (until is None or k <= until)",
        "plans",
    ),
    _defect(
        "strategies/fixed.py",
        'figures={"rho": best.rho, "algebraic_connectivity": frequency * connectivity},',
        'figures={"rho": best.rho, "algebraic_connectivity": connectivity},',
        "strategies/test_fixed.py", "plans",
    ),
    _defect(
        "records.py",
        'return lines[:-1] if lines and not lines[-1].endswith("\\n") else lines',
        "return lines",
        "test_records.py",
    ),
    _defect(
        "strategies/strategy.py",
        "        if due > before:",
        "        if due >= before:",
        "strategies/test_strategy.py",
    ),
    _defect(
        "training/momentum/rules.py",
        "gradients.add_(self.tracked).sub_(self.mean)",
        "gradients.add_(self.tracked).add_(self.mean)",
        "training", "distributed/test_momentum.py",
    ),
    _defect(
        "training/clipping.py",
        "return 1.0 if length <= limit else limit / length",
        "return 1.0 if length <= limit else length / limit",
        "training", "distributed/exchange",
    ),
    _defect(
        "zoo/data.py",
        "shared[worker], shared[giver] = shared[giver][:1], shared[giver][1:]",
        "shared[worker], shared[giver] = shared[giver][:1], shared[giver]",
        "zoo",
    ),
    _defect(
        "simulation/pace.py",
        'self.iterations, self._steps = list(state["iterations"]), list(state["steps"])',
        'self._steps = list(state["steps"])',
        "simulation",
    ),
    _defect(
        "distributed/exchange/hooks.py",
        "limit = meeting.weight * self._allowance * math.sqrt(reach)",
        "limit = self._allowance * math.sqrt(reach)",
        "distributed/exchange",
    ),
    _defect(
        "distributed/exchange/averaging.py",
        "x.add_(z - x / self.omega)",
        "x.add_(z - x)",
        "distributed/exchange", "distributed/test_gossip.py",
    ),
    _defect(
        "distributed/exchange/meeting.py",
        "found.append(Meeting(t, j if i == worker else i, weight))",
        "found.append(Meeting(t, i if i == worker else j, weight))",
        "distributed/exchange", "distributed/test_gossip.py",
    ),
    _defect(
        "distributed/snapshot.py",
        'tensor.copy_(saved.tensor(f"gossip/{name}"))',
        'saved.tensor(f"gossip/{name}")',
        "distributed/test_snapshot.py", "distributed/test_checkpoint.py",
        "distributed/test_momentum.py",
    ),
    _defect(
        "distributed/transports/collectives.py",
        "if step == m - 2:",
        "if step == m - 1:",
        "distributed/transports",
    ),
    _defect(
        "distributed/transports/waiting.py",
        "        if now > self._end:\n",
        "        if now > self._end + 1e9:\n",
        "distributed/transports", "distributed/test_waiting.py", "distributed/test_manners.py",
    ),
    _defect(
        "distributed/links/link_state.py",
        "return mine < version <= mine + _MAX_JUMP",
        "return mine <= version <= mine + _MAX_JUMP",
        "distributed/links",
    ),
    _defect(
        "distributed/exchange/momentum.py",
        "has_stepped, part.has_stepped = part.has_stepped, False",
        "has_stepped = part.has_stepped",
        "distributed/test_momentum.py", "distributed/exchange", "distributed/test_skipped.py",
    ),
)  # fmt: skip


def copy_tree(target: Path) -> None:
    """The repository's files as they are now, without what was made from them."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            copy2(ROOT / name, target / name)


def tests_pass(tests: Sequence[str], tree: Path) -> bool:
    """Whether the tests of a tree that `make test` runs pass.

    Raises:
        RuntimeError: They did not run.
    """
    command = [sys.executable, "-m", "pytest", *(f"tests/{name}" for name in tests), "-x", "-q"]
    command += ["-m", "not long", "-p", "no:cacheprovider", "--timeout", "300"]
    # Children of the tests must import the tree too, not what is installed.
    environment = os.environ | {"PYTHONPATH": str(tree / "src")}
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, env=environment)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"the tests {', '.join(tests)} did not run:\n{done.stdout[-2000:]}")
    return done.returncode == 0


def is_caught(defect: Defect, tree: Path, *, all_tests: bool) -> bool:
    """Whether some test that `make test` runs fails in a tree where the defect is planted."""
    before = defect.apply(tree)
    try:
        return not tests_pass([""] if all_tests else defect.tests, tree)
    finally:
        (tree / SOURCE / defect.file).write_text(before, encoding="utf-8")


def plant(defects: Sequence[Defect], jobs: int, *, all_tests: bool) -> list[Defect]:
    """Plant each in turn, print what became of it, and return those that no test noticed."""
    with tempfile.TemporaryDirectory(prefix="defects-") as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            copy_tree(Path(folder) / str(number))
            trees.put(Path(folder) / str(number))

        tests = [""] if all_tests else sorted({name for defect in defects for name in defect.tests})
        if not tests_pass(tests, Path(folder) / "0"):
            raise SystemExit("The tests fail without any defect: mend them first.")

        def look(defect: Defect) -> bool:
            tree = trees.get()
            try:
                caught = is_caught(defect, tree, all_tests=all_tests)
            finally:
                trees.put(tree)
            print(f"{'caught' if caught else 'MISSED'}  {defect.file}: {defect.new.strip()!r}")
            sys.stdout.flush()
            return caught

        with ThreadPoolExecutor(jobs) as pool:
            found = list(pool.map(look, defects))
    return [defect for defect, caught in zip(defects, found, strict=True) if not caught]


def main() -> None:
    """Parse, plant, exit with 1 if any was missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("modules", nargs="*", help="parts of modules' names; by default all")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--all-tests", action="store_true", help="not only those of the subject")
    given = parser.parse_args()
    chosen = [
        defect
        for defect in DEFECTS
        if not given.modules or any(name in defect.file for name in given.modules)
    ]
    missed = plant(chosen, given.jobs, all_tests=given.all_tests)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} were caught.")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
