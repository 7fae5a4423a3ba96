from __future__ import annotations

import pytest

from reproduction.claims import Claim, judge, table


@pytest.mark.parametrize(
    ("value", "at_least", "verdict"),
    [
        (5.2, True, "holds"),
        (5.0, True, "holds"),
        (4.5, True, "holds nearly"),
        (3.9, True, "does not hold"),
        (float("nan"), True, "does not hold"),
        (None, True, "not measured"),
    ],
)
def test_larger_is_better(value, at_least, verdict):
    assert judge(value, 5.0, nearly=4.0, at_least=at_least) == verdict


@pytest.mark.parametrize(
    ("value", "verdict"), [(0.9, "holds"), (1.05, "holds nearly"), (1.2, "does not hold")]
)
def test_smaller_is_better(value, verdict):
    assert judge(value, 1.0, nearly=1.1, at_least=False) == verdict


def test_table_marks_our_own_claims():
    claims = [
        Claim(statement="a", measured="1", verdict="holds"),
        Claim(statement="b", measured="2", verdict="does not hold", source="ours"),
    ]
    lines = table(claims).splitlines()
    assert lines[2] == "| a | 1 | **holds** |"
    assert lines[3] == "| *(ours)* b | 2 | **does not hold** |"
