from __future__ import annotations

import pytest

from matcha.errors import InputError
from matcha.training.delays import Delays


def test_delays_refuse_nonsense():
    with pytest.raises(InputError, match="seconds_per_unit"):
        Delays(seconds_per_unit=float("nan"))
