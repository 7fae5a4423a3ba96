"""Signals for processes that a test starts."""

from __future__ import annotations

import signal


def hear_ctrl_c() -> None:
    """For `preexec_fn`: a test run in the background of a shell inherits deafness to SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
