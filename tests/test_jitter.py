from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOOK = """
from matcha.distributed import Gossip, LinkTransport
print([call.__wrapped__.__name__ for call in (Gossip.step, LinkTransport.post)])
"""


def test_the_calls_that_nap_exist_and_nap() -> None:
    """Importing fails where a call of its list is no more."""
    paths = os.pathsep.join([str(ROOT / "tools" / "jitter"), str(ROOT / "src")])
    environment = {**os.environ, "PYTHONPATH": paths, "JITTER": "1e-6"}
    done = subprocess.run(
        [sys.executable, "-c", LOOK], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "['step', 'post']\n"), done.stderr
