"""Drafts: a process of its own makes what this one would have made, and may fail."""

from __future__ import annotations

import json

import pytest

import matcha
from matcha.distributed.elastic import drafts
from matcha.distributed.elastic.drafts import Draft
from matcha.strategies.staged import next_level

RING = matcha.families.ring(4)
PLAN = matcha.plan(RING, 0.5, "greedy", effort="none")
SECONDS = dict.fromkeys(RING.links, 0.1) | {(0, 1): 1.0}


def test_a_process_makes_what_this_one_would() -> None:
    draft = Draft(PLAN, SECONDS, 8)
    told = json.loads(json.dumps(draft.to_json()))
    assert told["due"] == 8
    assert {(i, j): s for i, j, s in told["links"]} == SECONDS
    assert draft.made().digest == next_level(PLAN, SECONDS).digest


def test_where_the_process_fails_the_worker_plans_itself(monkeypatch, caplog) -> None:
    caplog.set_level("INFO", logger="matcha.links")
    monkeypatch.setattr(drafts, "_ANSWER", "raise SystemExit(3)")
    assert Draft(PLAN, SECONDS, 8).made() == next_level(PLAN, SECONDS)
    assert "planning here" in caplog.text


def test_a_draft_that_is_dropped_is_over() -> None:
    draft = Draft(PLAN, SECONDS, 8)
    draft.drop()
    assert draft._process.poll() is not None
    with pytest.raises(ValueError, match="closed"):
        draft.made()
