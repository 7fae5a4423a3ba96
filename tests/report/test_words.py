from __future__ import annotations

import pytest

from matcha.report import words


def row(**values):
    base = {
        "label": "greedy",
        "strategy": "greedy",
        "clock": "wall",
        "epochs": 5.0,
        "time_to_target": 2.0,
        "speedup": 3.456,
    }
    return base | values


def payload(*rows, target=0.5, objective="train_loss"):
    return {"summaries": list(rows), "target": target, "objective": objective}


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0 ms"), (0.5, "500 ms"), (119.0, "119 s"), (600.0, "10 min")],
)
def test_seconds_are_said_as_people_say_them(value, text):
    assert words.seconds(value) == text


def test_the_headline_names_the_first_and_its_lead_over_vanilla():
    vanilla = row(label="vanilla", strategy="vanilla", time_to_target=7.0, speedup=1.0)
    told = words.headline(payload(vanilla, row()))
    assert told == "greedy reached training loss 0.5 in 2 s, 3.46× sooner than vanilla."


def test_a_simulated_clock_is_said_to_be_one():
    assert "(simulated)" in words.headline(payload(row(clock="simulated")))


def test_without_vanilla_the_others_are_named():
    slower = row(label="matcha", strategy="matcha", time_to_target=4.0, speedup=None)
    told = words.headline(payload(row(speedup=None), slower))
    assert told.endswith("before matcha.")


def test_when_nobody_reached_the_target_no_winner_is_claimed():
    told = words.headline(payload(row(time_to_target=None, speedup=None)))
    assert told == "1 run of 5 epochs."


def test_when_vanilla_is_first_it_is_said():
    vanilla = row(label="vanilla", strategy="vanilla", time_to_target=1.0, speedup=1.0)
    told = words.headline(payload(vanilla, row(speedup=0.5)))
    assert told == "vanilla reached training loss 0.5 in 1 s, before greedy."


def test_text_alternatives_hold_the_numbers():
    runs = [{"label": "a", "curves": {"train_loss": {"y": [2.0, 0.5], "epoch": [1, 9]}}}]
    told = words.curve_text({"runs": runs}, "train_loss", "epoch")
    assert told == "Train loss against epochs: a from 2 to 0.5 over 9 epochs."
