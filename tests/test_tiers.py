"""What `make test` leaves out is marked with a reason, listed, and run by `make test-all`."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

import tiers

ROOT = Path(__file__).parent.parent


def test_every_mark_is_in_the_table_with_its_reason():
    """`tests/test_docs.py` checks that the table of CONTRIBUTING is this one."""
    found = list(tiers.long_tests())
    assert all(why for _, _, why in found)
    marks = sum(
        len(re.findall(r"^\s*@pytest\.mark\.long\(", file.read_text(encoding="utf-8"), re.M))
        for file in tiers.TESTS.rglob("*.py")
    )
    others = sum(
        len(re.findall(r"mark\.long\b", file.read_text(encoding="utf-8")))
        for file in tiers.TESTS.rglob("*.py")
        if file != Path(__file__)
    )
    assert len(found) == marks == others > 0
    assert "<!-- begin:long -->" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def _rule(target: str) -> str:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.search(rf"^{target}:(.*\n(?:\t.*\n)+)", text, re.M)
    assert found is not None, target
    return found[1]


def test_make_test_leaves_out_the_long_and_make_test_all_nothing():
    assert "$(MAKE) unit\n" in _rule("test")
    assert '-m "not long"' in _rule("unit")
    assert "$(MAKE) unit-all\n" in _rule("test-all")
    assert " -m " not in _rule("unit-all")
    for target in ("lint", "types", "doctest"):
        assert target in _rule("test")
        assert target in _rule("test-all")


def test_public_ci_runs_make_test_and_every_night_make_test_all():
    assert "make test\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    assert "schedule" in workflow[True]  # YAML reads `on` so
    (step,) = [s for s in workflow["jobs"]["test"]["steps"] if "make" in s.get("run", "")]
    assert step["run"] == 'make "$TIER"'
    assert "&& 'test' || 'test-all'" in step["env"]["TIER"]
