"""Documents: what cannot be written is one sentence, and nothing half-written stays behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from matcha.documents import write_atomically, writing
from matcha.errors import MatchaError, WriteError


@pytest.mark.parametrize(
    ("place", "reason"),
    [("/proc/matcha.json", "No such file"), ("/dev/null/matcha.json", "a file stands")],
)
def test_places_that_cannot_be_written_are_named_in_one_sentence(place, reason):
    with pytest.raises(WriteError, match=reason) as error:
        write_atomically(Path(place), "{}")
    assert isinstance(error.value, MatchaError)
    assert place in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_in_the_place_of_a_file_leaves_nothing_behind(tmp_path):
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(WriteError, match="directory"):
        write_atomically(tmp_path / "plan.json", "{}")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_full_disk_is_said():
    full = Path("/dev/full")
    with pytest.raises(WriteError, match="No space left"), writing(full), full.open("w") as file:
        file.write("x" * 100_000)
