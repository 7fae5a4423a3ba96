from __future__ import annotations

import json
import math
import multiprocessing
import os

import pytest

from matcha._io import (
    Registry,
    decode_number,
    encode_number,
    fingerprint,
    load_document,
    replace_file,
    save_document,
    write_atomically,
)
from matcha.errors import InputError, PlanError, WriteError

DOCUMENT = {"schema": "matcha.test/1", "value": [1, 2.5, None]}


def test_a_document_comes_back(tmp_path):
    save_document(DOCUMENT, tmp_path / "new" / "file.json")
    assert load_document(tmp_path / "new" / "file.json", dict) == DOCUMENT


def write_often(path, mark, start):
    start.wait()
    for _ in range(40):
        save_document({**DOCUMENT, "mark": mark * 50_000}, path)


def test_several_processes_may_write_the_same_file(tmp_path):
    """Whoever reads meanwhile sees the whole of one of them; nothing else is left behind."""
    path = tmp_path / "file.json"
    save_document({**DOCUMENT, "mark": "first"}, path)
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(3)
    writers = [context.Process(target=write_often, args=(path, mark, start)) for mark in "ab"]
    for writer in writers:
        writer.start()
    start.wait()
    while any(writer.is_alive() for writer in writers):
        assert set(load_document(path, dict)["mark"]) in ({"a"}, {"b"}, set("first"))
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert [file.name for file in tmp_path.iterdir()] == ["file.json"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file.json"]


def test_a_file_has_the_mode_that_any_other_gets(tmp_path):
    write_atomically(tmp_path / "ours", "")
    (tmp_path / "theirs").write_text("")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "theirs").stat().st_mode


def test_a_file_in_the_way_of_a_folder_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match=r"cannot write .*file stands where its folder should be"):
        write_atomically(tmp_path / "file" / "inside", "")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "truncated, damaged"),
        ("[" * 100_000, "truncated, damaged"),
        ("[]", "no schema name inside"),
        ('{"schema": "theirs/1"}', "no schema name inside"),
        (json.dumps({**DOCUMENT, "checksum": "0"}), "checksum does not match"),
    ],
)
def test_a_damaged_document_is_one_sentence(text, sentence, tmp_path):
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(InputError, match=sentence):
        load_document(tmp_path / "file.json", dict)


def test_a_missing_document_is_one_sentence(tmp_path):
    with pytest.raises(InputError, match="cannot be read: No such file"):
        load_document(tmp_path / "file.json", dict)


def test_numbers_that_json_lacks_are_words():
    for value in (0.5, math.inf, -math.inf):
        assert decode_number(json.loads(json.dumps(encode_number(value)))) == value
    assert math.isnan(decode_number(encode_number(math.nan)))
    assert decode_number("matcha") == "matcha"


def test_the_order_of_keys_does_not_matter():
    assert fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": [2], "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})


class Grey:
    def __init__(self, share):
        self.share = share

    def to_json(self):
        return {"model": "grey", "share": self.share}


def read_grey(document, factor):
    return Grey(factor * document["share"])


def test_kinds_are_read_by_their_names_and_everything_else_is_refused():
    kinds = Registry("colour", "model", "paint.register", {"black": lambda document, factor: None})
    with pytest.raises(PlanError, match=r"the colour Grey cannot be saved: .*paint\.register"):
        kinds.to_json(Grey(0.5))
    kinds.register("grey", read_grey)
    kinds.register("grey", read_grey)
    assert kinds.from_json(kinds.to_json(Grey(0.5)), 2).share == 1
    with pytest.raises(InputError, match="a colour 'black' is registered already"):
        kinds.register("black", read_grey)
    with pytest.raises(PlanError, match=r"its colour 'red' is unknown: .*paint\.register"):
        kinds.from_json({"model": "red"}, 2)
    with pytest.raises(PlanError, match="its colour is not an object"):
        kinds.from_json(["grey"], 2)
    with pytest.raises(PlanError, match="cannot be saved"):
        kinds.to_json(3)


def test_a_disk_that_takes_a_part_only_is_one_sentence_and_leaves_nothing(tmp_path, no_room):
    torch = pytest.importorskip("torch")  # which says no more than that its position is strange
    with no_room, pytest.raises(WriteError, match="cannot write"):  # noqa: SIM117
        with replace_file(tmp_path / "checkpoint.pt") as partial:
            torch.save({"weights": torch.zeros(100_000)}, partial)
    assert not list(tmp_path.iterdir())


def test_errors_that_are_not_the_disks_stay_what_they_are(tmp_path):
    with pytest.raises(RuntimeError, match="other"), replace_file(tmp_path / "file"):
        raise RuntimeError("other")
    assert not list(tmp_path.iterdir())
