from __future__ import annotations

import json
import stat
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from tests.commands import matcha_command

from matcha._io.keys import Keys, issue, new_keys, read_certificates, revoke
from matcha.errors import InputError


def test_a_directory_of_keys(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    made = new_keys(folder, 2, days=30)
    assert [c.name for c in made] == ["authority", "worker-0", "worker-1"]
    left = made[1].end - datetime.now(timezone.utc)
    assert timedelta(days=29) < left < timedelta(days=31)
    for key in folder.glob("*.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    with pytest.raises(InputError, match="holds an authority already"):
        new_keys(folder, 2)
    before = made[2].fingerprint
    issue(folder, 1)
    after = read_certificates(folder)[2]
    assert not after.revoked
    assert Keys(directory=folder, rank=0).revoked() == {before}
    revoke(folder, [1])
    assert read_certificates(folder)[2].revoked
    with pytest.raises(InputError, match="no certificate of worker 7"):
        revoke(folder, [7])


def test_missing_and_damaged_keys_are_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"lacks 'authority\.pem': make keys with"):
        Keys(directory=tmp_path, rank=0)
    with pytest.raises(InputError, match="holds no keys"):
        read_certificates(tmp_path)
    new_keys(tmp_path / "keys", 1)
    with pytest.raises(InputError, match=r"lacks 'worker-3\.pem'"):
        Keys(directory=tmp_path / "keys", rank=3)
    (tmp_path / "keys" / "worker-0.key").write_text("nonsense")
    with pytest.raises(InputError, match="cannot be used"):
        Keys(directory=tmp_path / "keys", rank=0).context(server=True)
    (tmp_path / "keys" / "authority.key").unlink()
    with pytest.raises(InputError, match="lacks the authority's key"):
        issue(tmp_path / "keys", 0)
    with pytest.raises(InputError, match="at least one worker"):
        new_keys(tmp_path / "other", 0)


def test_the_commands(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    made = matcha_command("keys", "new", folder, "--workers", 2)
    assert made.returncode == 0, made.stderr
    assert "worker-1" in made.stdout
    revoked = matcha_command("keys", "revoke", folder, "--worker", 1, "--json")
    assert [row["revoked"] for row in json.loads(revoked.stdout)] == [False, False, True]
    renewed = matcha_command("keys", "renew", folder, "--worker", 1, "--days", -1)
    assert renewed.returncode == 0, renewed.stderr
    assert "expired" in matcha_command("keys", "show", folder).stdout
    wrong = matcha_command("keys", "show", tmp_path / "nothing")
    assert wrong.returncode == 2
    assert "matcha keys new" in wrong.stderr
