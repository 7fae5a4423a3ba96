"""Text: reading a folder of documents, sharing it, and training on it, one by one or stacked."""

from __future__ import annotations

import gzip
import importlib.util
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.datasets import write_text

import matcha
from matcha.errors import DataError, InputError
from matcha.simulation import Settings, Simulation
from matcha.training.optimizers import adamw
from matcha.training.rates import Cosine
from matcha.training.settings import Execution
from matcha.zoo.corpus import read_corpus
from matcha.zoo.language import TextTask, share
from matcha.zoo.models import SmallCNN, Transformer
from matcha.zoo.recipes import recipe

WORDS = {"round", "matching", "worker", "budget", "link", "plan"}


@pytest.fixture
def folder(tmp_path):
    """Two folders of twenty documents, one gzipped, and a file that is no text."""
    write_text(tmp_path)
    (tmp_path / "second" / "packed.txt.gz").write_bytes(gzip.compress(b"plan " * 50))
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    return tmp_path


def small(corpus):
    return lambda: Transformer(corpus.num_tokens, 16, 2, 2, length=12, dropout=0, batch_first=True)


def task(corpus, workers=4, **choices):
    options = {"batch_size": 2, "length": 12, "steps_per_epoch": 5} | choices
    return TextTask("text", corpus, workers, small(corpus), **options)


# -- the corpus ------------------------------------------------------------------------------------


def test_documents_are_split_as_wholes_and_bytes_are_tokens(folder):
    corpus = read_corpus(folder, vocabulary=257)
    assert corpus.folders == ("first", "second")
    ends = np.flatnonzero(corpus.train == 256)
    assert np.array_equal(corpus.starts, np.concatenate([[0], ends[:-1] + 1]))
    held_out = int((corpus.valid == 256).sum())
    assert held_out >= 1
    assert len(corpus.starts) + held_out == 41
    first = bytes(corpus.train[: ends[0]].astype(np.uint8)).decode()
    assert set(first.split()) <= WORDS
    assert corpus.bytes_per_token == pytest.approx(1, abs=0.01)


@pytest.mark.skipif(importlib.util.find_spec("tokenizers") is None, reason="needs tokenizers")
def test_bpe_tokens_are_fewer_than_bytes_and_learned_without_the_validation_text(folder):
    corpus = read_corpus(folder, vocabulary=300)
    assert len(corpus.train) < len(read_corpus(folder, vocabulary=257).train) / 3
    assert corpus.bytes_per_token > 3
    assert corpus.num_tokens == 300


def test_without_tokenizers_text_is_cut_into_bytes_with_a_word(folder, monkeypatch, caplog):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert read_corpus(folder).num_tokens == 257
    assert "`tokenizers` is not installed" in caplog.text


def test_tokens_are_kept_until_a_document_changes(folder):
    first = read_corpus(folder, vocabulary=257)
    kept = folder / ".matcha-tokens-257.npz"
    written = kept.stat().st_mtime_ns
    assert np.array_equal(read_corpus(folder, vocabulary=257).train, first.train)
    assert kept.stat().st_mtime_ns == written
    (folder / "first" / "00.txt").write_text("link")
    assert len(read_corpus(folder, vocabulary=257).train) < len(first.train)


def test_kept_tokens_that_were_cut_short_are_made_again(folder):
    first = read_corpus(folder, vocabulary=257)
    kept = folder / ".matcha-tokens-257.npz"
    kept.write_bytes(kept.read_bytes()[:100])
    assert np.array_equal(read_corpus(folder, vocabulary=257).train, first.train)


def test_kept_tokens_alone_are_enough(folder, tmp_path_factory):
    first, bare = read_corpus(folder, vocabulary=257), tmp_path_factory.mktemp("bare")
    name = ".matcha-tokens-257.npz"
    (bare / name).write_bytes((folder / name).read_bytes())
    assert np.array_equal(read_corpus(bare, vocabulary=257).valid, first.valid)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda root: root / "nowhere", "is not a folder"),
        (lambda root: (root / "empty").mkdir() or root / "empty", "holds 0 text files"),
    ],
)
def test_a_folder_without_documents_is_refused(folder, spoil, words):
    with pytest.raises(DataError, match=words):
        read_corpus(spoil(folder))


def test_a_damaged_gzip_file_is_named(folder):
    (folder / "first" / "bad.txt.gz").write_bytes(b"\x1f\x8bnot gzip")
    with pytest.raises(DataError, match=r"bad\.txt\.gz"):
        read_corpus(folder)


# -- sharing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["iid", "documents", "folders"])
def test_every_token_has_one_worker(folder, split):
    corpus = read_corpus(folder, vocabulary=257)
    parts = share(corpus, 4, split, seed=1)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert np.array_equal(np.sort(np.concatenate(parts)), np.sort(corpus.train))


def test_folders_make_data_differ(folder):
    corpus = read_corpus(folder, vocabulary=257)
    first, *_, last = share(corpus, 4, "folders")
    assert "worker" in bytes(first[:600].astype(np.uint8)).decode(errors="replace")
    assert "worker" not in bytes(last[:600].astype(np.uint8)).decode(errors="replace")


def test_what_cannot_be_shared_is_refused(folder):
    corpus = read_corpus(folder, vocabulary=257)
    with pytest.raises(InputError, match="iid, documents or folders"):
        share(corpus, 2, "shards")
    with pytest.raises(InputError, match="documents in two folders"):
        share(replace(corpus, folders=("first",)), 2, "folders")
    with pytest.raises(DataError, match="too few for a batch of 99999"):
        task(corpus, batch_size=99_999)


# -- the task --------------------------------------------------------------------------------------


def test_a_pass_reads_every_window_once(folder):
    corpus = read_corpus(folder, vocabulary=257)
    made = task(corpus, workers=2)
    made.to(torch.device("cpu"), torch.float32)
    (windows,) = {(len(part) - 1) // 12 for part in share(corpus, 2, "iid")}
    epochs = -(-windows // 10)
    starts = np.concatenate([made.tables(epoch)["start"][:, 1] for epoch in range(epochs)])
    first = starts.reshape(-1)[:windows]
    assert len(set(first.tolist())) == windows
    x, y = made.batch({"start": torch.from_numpy(made.tables(0)["start"][0])})
    assert x.shape == y.shape == (2, 2, 12)
    assert torch.equal(x[..., 1:], y[..., :-1])


def test_stacked_passes_equal_those_one_by_one(folder):
    corpus = read_corpus(folder, vocabulary=257)
    plan = matcha.plan(matcha.families.ring(4), budget=0.5, strategy="matcha")
    rows = {}
    for batching in ("loop", "stacked"):
        settings = Settings(
            epochs=2,
            schedule=Cosine(base=0.01, epochs=2),
            optimizer=adamw(),
            execution=Execution(precision="float64", batching=batching),
        )
        simulation = Simulation(task(corpus), plan, settings)
        losses = [record.worker_loss for record in simulation]
        rows[batching] = simulation.engine.workers.parameters, losses
    assert rows["stacked"][1] == pytest.approx(rows["loop"][1], rel=1e-12)
    torch.testing.assert_close(rows["stacked"][0], rows["loop"][0], rtol=1e-9, atol=1e-12)
    assert rows["loop"][1][-1] < rows["loop"][1][0]


def test_only_models_that_stack_are_stacked(folder):
    from matcha.simulation.execution import choose_batching

    with pytest.raises(InputError, match="SmallCNN takes one worker's"):
        choose_batching(SmallCNN(10), Execution(batching="stacked"))


def test_an_epoch_is_at_most_a_pass(folder):
    corpus = read_corpus(folder, vocabulary=257)
    made = task(corpus, workers=2, steps_per_epoch=None)
    (windows,) = {(len(part) - 1) // 12 for part in share(corpus, 2, "iid")}
    assert made.steps_per_epoch == min(250, windows // 2)


def test_the_recipe_follows_a_cosine():
    rates = recipe("text").schedule(10)
    assert rates.rate(10) == pytest.approx(0.1 * rates.rate(0.4))
