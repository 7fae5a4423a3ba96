from __future__ import annotations

from dataclasses import replace

from tests.report.runs import run_of

from matcha.report.groups import group_runs, label_runs


def test_labels_say_only_what_sets_runs_apart(tmp_path):
    def labels(*kinds):
        return label_runs(
            [run_of([1], strategy=s, budget=b, seed=k, tmp_path=tmp_path) for s, b, k in kinds]
        )

    assert labels(("matcha", 0.3, 0), ("greedy", 0.3, 0)) == ["matcha", "greedy"]
    assert labels(("matcha", 0.3, 0), ("matcha", 0.1, 0)) == ["matcha 0.3", "matcha 0.1"]
    assert labels(("matcha", 0.3, 0), ("matcha", 0.3, 1)) == [
        "matcha 0.3, seed 0",
        "matcha 0.3, seed 1",
    ]
    assert labels(("vanilla", 1, 0), ("vanilla", 1, 0), ("greedy", 0.1, 0), ("greedy", 0.2, 0)) == [
        "vanilla",
        "vanilla (2)",
        "greedy 0.1",
        "greedy 0.2",
    ]


def test_labels_tell_the_wire_and_a_momentum_that_differs(tmp_path):
    def labels(*kinds):
        runs = [run_of([1], strategy="greedy", budget=0.1, tmp_path=tmp_path) for _ in kinds]
        return label_runs(
            [
                replace(run, header=replace(run.header, wire=wire, momentum=momentum))
                for run, (wire, momentum) in zip(runs, kinds, strict=True)
            ]
        )

    assert labels(("float32", "local"), ("modulo:3", "local")) == ["greedy", "greedy, modulo:3"]
    assert labels(("modulo:3", "local"), ("modulo:3", "outer")) == [
        "greedy 0.1, modulo:3, local",
        "greedy 0.1, modulo:3, outer",
    ]


def test_a_name_that_adds_to_the_label_is_the_label(tmp_path):
    names = ["matcha 0.3", "matcha 0.3", "matcha 0.3, twice as long", "elsewhere"]
    made = [
        run_of([1], strategy="matcha", budget=0.3, seed=k, tmp_path=tmp_path) for k in (0, 1, 0, 2)
    ]
    named = [
        replace(run, header=replace(run.header, name=name))
        for run, name in zip(made, names, strict=True)
    ]
    assert label_runs(named) == [
        "matcha 0.3, seed 0",
        "matcha 0.3, seed 1",
        "matcha 0.3, twice as long",
        "matcha 0.3, seed 2",
    ]


def test_runs_of_the_same_seed_stay_apart(tmp_path):
    groups = group_runs([run_of([4, 2, 2], tmp_path=tmp_path)] * 2)
    assert [len(group) for group in groups] == [1, 1]
    assert label_runs([group[0] for group in groups]) == ["matcha 0.5", "matcha 0.5 (2)"]


def test_seeds_of_one_choice_are_one_group_wherever_the_seed_is_written(tmp_path):
    def named(seed, rate):
        config = {"settings": {"rate": rate, "seed": seed}, "command": f"--seed {seed}"}
        run = run_of([1], seed=seed, config=config, tmp_path=tmp_path)
        return replace(run, header=replace(run.header, name=f"matcha-0.5-s{seed}"))

    groups = group_runs([named(0, 0.1), named(0, 0.2), named(1, 0.1), named(2, 0.1)])
    assert [[run.header.seed for run in group] for group in groups] == [[0, 1, 2], [0]]
