from __future__ import annotations

import pytest

from matcha.report import words


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0 ms"), (0.5, "500 ms"), (119.0, "119 s"), (600.0, "10 min")],
)
def test_seconds_are_said_as_people_say_them(value, text):
    assert words.seconds(value) == text


def test_what_is_no_number_is_a_dash():
    assert [words.number(x) for x in (float("nan"), 0.0)] == ["–", "0"]


def test_text_alternatives_hold_the_numbers():
    runs = [{"label": "a", "curves": {"train_loss": {"y": [2.0, 0.5], "epoch": [1, 9]}}}]
    told = words.curve_text({"runs": runs}, "train_loss", "epoch")
    assert told == "Train loss against epochs: a from 2 to 0.5 over 9 epochs."
