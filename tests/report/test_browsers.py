from __future__ import annotations

import pytest
from tests.report.browsers import executable


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail), ("", pytest.skip)])
def test_a_missing_browser_is_a_failure_in_ci_and_a_reason_elsewhere(monkeypatch, ci, outcome):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome.Exception, match="make browser"):
        executable()
