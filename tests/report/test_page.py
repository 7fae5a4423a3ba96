from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from tests.quadratics import write_quadratic_run
from tests.report.runs import run_of

import matcha
from matcha.errors import InputError
from matcha.records import read_run
from matcha.report import load_runs, write_report
from matcha.report.page import build_payload, embed_json, render


def payload_of(page):
    text = page.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="matcha-data">(.*?)</script>', text, re.S)[1])


def test_the_page_is_one_file_that_names_no_other(report_page):
    text = report_page.read_text(encoding="utf-8")
    assert len(text.encode()) < 5_000_000
    own = text[: text.index("plotly.js (basic")] + text[text.index('"use strict";\n(() =>') :]
    assert not re.search(r'(src|href)="(?!data:|#)', own)
    assert "default-src 'none'" in text
    assert "{{" not in own


def test_the_page_holds_the_results_without_javascript(report_page):
    text = report_page.read_text(encoding="utf-8")
    table = re.search(r'<table class="results">.*?</table>', text, re.S)[0]
    for strategy in ("vanilla", "periodic", "matcha", "greedy"):
        assert strategy in table
    assert "1.00×" in table
    assert "sooner than vanilla" in text


def test_the_page_says_how_to_do_it_again(report_page, run_folders):
    text = report_page.read_text(encoding="utf-8")
    assert "matcha simulate paper:er8 --strategy matcha" in text
    assert "plan digest" in text
    for package, version in read_run(run_folders[0]).header.versions.items():
        assert package in text
        assert version in text


def test_names_cannot_break_out_of_the_page(tmp_path):
    evil = "</script><script>alert(1)</script>"
    topology = matcha.Topology.from_links([(evil, "b"), ("b", "<i>c</i>")], name=evil)
    plan = matcha.plan(topology, 1.0, "vanilla")
    write_quadratic_run(tmp_path / "run", plan, iterations=4, config={"note": evil})
    page = write_report([tmp_path / "run"], tmp_path / "page.html", title=f"<b>{evil}")
    text = page.read_text(encoding="utf-8")
    assert evil not in text
    assert "<i>c</i>" not in text
    assert payload_of(page)["networks"][0]["labels"][0] in (evil, "b", "<i>c</i>")


def test_embedded_json_refuses_nan():
    with pytest.raises(ValueError, match="JSON"):
        embed_json({"rho": float("nan")})


def test_runs_are_found_below_a_folder_and_missing_ones_are_named(tmp_path, run_folders):
    assert len(load_runs([run_folders[0].parent])) == 4
    with pytest.raises(InputError, match="holds no run"):
        load_runs([tmp_path])
    with pytest.raises(InputError, match="at least one run"):
        load_runs([])


def test_a_run_without_plan_or_losses_still_has_a_page(tmp_path):
    plan = matcha.plan(matcha.families.ring(4), 1.0, "vanilla")
    folder = write_quadratic_run(tmp_path / "run", plan, iterations=4, traced_iterations=0)
    (folder / "plan.json").unlink()
    (folder / "records.jsonl").unlink()
    page = write_report([folder], tmp_path / "page.html")
    assert 'id="explorer" aria-labelledby="explorer-title" hidden' in page.read_text()
    assert payload_of(page)["networks"] == []


def test_plans_alone_make_a_page_to_explore(tmp_path):
    plan = matcha.plan(matcha.families.ring(4), 0.5, "matcha")
    page = write_report([], tmp_path / "page.html", plans=[plan])
    payload = payload_of(page)
    assert payload["runs"] == []
    assert payload["networks"][0]["start"] == {"strategy": "matcha", "budget": 0.5}
    assert 'id="results" aria-labelledby="results-title" hidden' in page.read_text()


def test_a_headline_is_coloured_only_where_there_is_a_winner(tmp_path):
    quick = run_of([4, 1, 1], strategy="greedy", tmp_path=tmp_path)
    slow = run_of([4, 1, 1], strategy="vanilla", seconds=9, tmp_path=tmp_path)
    tied = replace(quick, header=replace(quick.header, strategy="matcha"))
    for runs, expected in (([quick, slow], "headline decided"), ([quick, tied], "headline")):
        page = render(build_payload(runs, target_loss=2), runs)
        assert f'<p class="{expected}">' in page
