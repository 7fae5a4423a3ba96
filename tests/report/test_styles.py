"""How runs look on the page: decided in the registry, told apart, readable in both themes."""

from __future__ import annotations

import pytest

from matcha.report.page import STYLES, place, style_sheet, styles_of
from matcha.strategies import STRATEGIES
from matcha.strategies.registry import LOOKS, look_of


def luminance(color):
    channels = (int(color[k : k + 2], 16) / 255 for k in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_a_strategy_has_the_style_of_its_place():
    for number, name in enumerate(STRATEGIES):
        assert place(name) == number
        look = LOOKS[name]
        assert (STYLES[number].light, STYLES[number].dark) == (look.light, look.dark)
        assert styles_of([name]) == [number]


def test_no_two_strategies_look_the_same():
    assert LOOKS.keys() == STRATEGIES.keys()
    for what in ("color", "marker"):
        assert len({getattr(look, what) for look in LOOKS.values()}) == len(LOOKS)
    assert look_of("mine") not in LOOKS.values()


def test_further_runs_take_spare_styles():
    spare = len(STRATEGIES)
    assert styles_of(["matcha", "matcha", "mine"]) == [place("matcha"), spare, spare + 1]
    many = styles_of(["greedy"] * len(STYLES))
    assert sorted(many) == list(range(len(STYLES)))
    assert len(styles_of(["greedy"] * 40)) == 40


@pytest.mark.parametrize("number", range(len(STYLES)))
def test_lines_stand_out_in_both_themes(number):
    style = STYLES[number]
    assert contrast(style.light, "#fdfdfb") >= 3
    assert contrast(style.dark, "#14171a") >= 3
    assert f"--s{number}: {style.light};" in style_sheet()
    assert f"--s{number}: {style.dark};" in style_sheet()


def test_no_two_styles_are_alike():
    looks = {(style.light, style.symbol, style.dash) for style in STYLES}
    assert len(looks) == len({style.light for style in STYLES}) == len(STYLES)
