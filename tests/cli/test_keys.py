from __future__ import annotations

import json

from tests.commands import matcha_command


def test_keys_are_made_shown_and_revoked(tmp_path):
    made = matcha_command("keys", "new", tmp_path / "keys", "--workers", 2, "--json")
    assert made.returncode == 0, made.stderr
    assert len(json.loads(made.stdout)) >= 2
    done = matcha_command("keys", "revoke", tmp_path / "keys", "--worker", 1, "--json")
    assert done.returncode == 0, done.stderr
    assert [c["revoked"] for c in json.loads(done.stdout)].count(True) == 1
    shown = matcha_command("keys", "show", tmp_path / "keys")
    assert shown.stdout.count(" revoked ") == 1
    assert shown.stdout.count(" valid ") >= 2  # the heading's "valid until", and the others
