from __future__ import annotations

from dataclasses import replace

from matcha._numerics import Certificate


def test_how_long_it_took_makes_no_other_certificate():
    one = Certificate(value=1.0, bound=1.1, gap=0.1, iterations=3, seconds=0.5)
    assert one == replace(one, seconds=9.0)
    assert one != replace(one, bound=1.2)
