from __future__ import annotations

import dataclasses
import html
import re

from tests.quadratics import write_quadratic_run
from tests.report.runs import run_of

import matcha
from matcha.records import read_run
from matcha.report.comparison import cell, columns
from matcha.report.page import build_payload, details, results_table


def test_the_best_of_a_column_is_marked_in_words_and_only_there(run_folders):
    payload = build_payload([read_run(folder) for folder in run_folders])
    table = results_table(payload)
    times = [row["time_to_target"] for row in payload["summaries"]]
    marked = re.findall(r'<strong>([\d.]+) s<span class="sr"> \(best\)', table)
    assert f"{min(times):.3g}" in marked
    assert table.count("<tr>") == len(run_folders) + 1


def test_columns_that_no_run_can_fill_are_left_out(tmp_path):
    plan = matcha.plan(matcha.families.ring(4), 1.0, "vanilla")
    run = read_run(write_quadratic_run(tmp_path / "run", plan, iterations=10))
    summaries = build_payload([run])["summaries"]
    assert "test_loss" not in {column.key for column in columns(summaries)}
    bare = [dict.fromkeys(summaries[0]) | {"unit": "units", "clock": "wall"}]
    assert columns(bare) == []


def test_a_runs_details_hold_its_command_seed_digest_and_nested_settings(tmp_path):
    plan = matcha.plan(matcha.families.ring(4), 1.0, "vanilla")
    config = {"settings": {"epochs": 3, "left_open": None}, "tags": ["a", "<b>"]}
    run = read_run(write_quadratic_run(tmp_path / "run", plan, iterations=4, config=config))
    text = details([run], ["vanilla"])
    assert "matcha simulate ring:4 --strategy vanilla" in text
    assert plan.digest in text
    assert '<th scope="row">settings epochs</th><td>3</td>' in text
    assert "left open" not in text
    assert html.escape('["a", "<b>"]') in text


def test_what_runs_share_is_said_once(run_folders):
    runs = [read_run(folder) for folder in run_folders]
    text = details(runs, [run.header.strategy for run in runs])
    assert text.count("<details") == len(runs) + 1
    assert text.count("versions") == 1
    assert text.count("plan digest") == len(runs)
    assert text.count("--strategy greedy") == 1


def test_where_there_is_no_verdict_nothing_is_marked(tmp_path):
    same = [
        run_of([4, 1, loss], strategy=name, tmp_path=tmp_path)
        for name, loss in (("greedy", 1), ("matcha", 0.5))
    ]
    payload = build_payload(same, target_loss=2)
    assert payload["winner"] is None
    assert "<strong>" not in results_table(payload)


def test_the_fastest_is_not_marked_where_it_is_not_ranked(tmp_path):
    told = {"test_accuracy_error": 0.01, "tmp_path": tmp_path}
    payload = build_payload(
        [
            run_of([4, 1, 1], strategy="vanilla", seconds=9, test_accuracy=0.9, **told),
            run_of([4, 1, 1], strategy="greedy", seconds=3, test_accuracy=0.9, **told),
            run_of([4, 1, 1], strategy="local", seconds=1, test_accuracy=0.5, **told),
        ],
        target_loss=2,
    )
    greedy, local = re.findall("<tr>.*?</tr>", results_table(payload))[2:]
    assert "<strong>2 s" in greedy
    assert "<strong>" not in local


def test_clocks_and_units_never_share_a_column(tmp_path):
    simulated = run_of([4, 1, 1], strategy="vanilla", tmp_path=tmp_path)
    real = run_of([4, 1, 1], strategy="greedy", tmp_path=tmp_path)
    real = dataclasses.replace(real, header=dataclasses.replace(real.header, clock="wall"))
    rows = build_payload([simulated, real], target_loss=2)["summaries"]
    rows[1]["unit"] = "ms"
    shown = {column.heading: [cell(column, row) for row in rows] for column in columns(rows)}
    assert shown["time to target, simulated"] == ["667 ms", "–"]
    assert shown["time to target, wall"] == ["–", "667 ms"]
    assert shown["communication to target, units"] == ["1.333", "–"]
    assert shown["communication to target, ms"] == ["–", "1.333"]


def test_who_missed_the_target_spent_nothing_to_reach_it(tmp_path):
    """Communication to the end of the run does not compare with communication to the target."""
    quick = run_of([4, 1, 1], strategy="vanilla", tmp_path=tmp_path)
    slow = run_of([4, 3, 3], strategy="greedy", tmp_path=tmp_path)
    rows = build_payload([quick, slow], target_loss=2)["summaries"]
    shown = {column.heading: [cell(column, row) for row in rows] for column in columns(rows)}
    assert shown["communication to target, units"] == ["1.333", "–"]
