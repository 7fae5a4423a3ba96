"""Language models: each worker reads its own stretch of a text, or documents of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from matcha.errors import DataError, InputError
from matcha.training.task import Evaluation, digest, generator
from matcha.zoo.corpus import Corpus, Tokens
from matcha.zoo.data import Labels, Text
from matcha.zoo.models import LanguageModel, ModelTask, Transformer, mean_cross_entropy


def _columns(words: Labels, batch_size: int) -> Labels:
    """The text cut into ``batch_size`` columns read side by side; time is the first axis."""
    length = len(words) // batch_size
    return np.ascontiguousarray(words[: length * batch_size].reshape(batch_size, length).T)


class _NextTokenTask(ModelTask):
    """Predict the next token, ``length`` of them per batch and place."""

    length: int

    def loss(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Cross-entropy per token; one per worker where models and batches are stacked."""
        scores, after = model(inputs, *state)
        return mean_cross_entropy(scores, targets, is_stacked=targets.dim() == 3), after


class LanguageTask(_NextTokenTask):
    """Predict the next word; an LSTM's state is carried from batch to batch within an epoch.

    Worker i reads the i-th of m equal stretches of the training text, at ``batch_size`` places at
    once, ``length`` words per batch and place, through which gradients flow back. The weights of
    what ``model`` makes come from ``seed``.
    """

    def __init__(
        self,
        name: str,
        text: Text,
        num_workers: int,
        model: Callable[[], LanguageModel | Transformer],
        *,
        batch_size: int = 10,
        length: int = 35,
        seed: int = 0,
    ) -> None:
        super().__init__(name, model, num_workers, batch_size, seed)
        self.length, self._text = length, text
        each = len(text.train) // num_workers
        stretches = [text.train[i * each : (i + 1) * each] for i in range(num_workers)]
        if each // batch_size <= length:
            raise DataError(
                f"the training text has {len(text.train):,} words: too few for "
                f"{num_workers} workers that read {batch_size} places, {length} words at a time"
            )
        if len(text.valid) < 2:
            raise DataError("the validation text must have 2 words or more to predict one")
        self._columns = np.stack([_columns(stretch, batch_size) for stretch in stretches])
        self.steps_per_epoch = (self._columns.shape[1] - 1) // length

    def data(self) -> dict[str, Any]:
        return {
            "length": self.length,
            "number of words": len(self._text.train),
            "text": digest(self._columns),
        }

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        self._words = torch.from_numpy(self._columns).to(device)
        self._steps = torch.arange(self.length + 1, device=device)
        valid = self._text.valid
        self._valid = torch.from_numpy(_columns(valid, min(64, len(valid) // 2))).to(device)

    def tables(self, epoch: int) -> dict[str, npt.NDArray[np.generic]]:
        starts = np.arange(self.steps_per_epoch, dtype=np.int64) * self.length
        return {"start": np.repeat(starts[:, None], self.num_workers, axis=1)}

    def batch(self, rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        times = rows["start"][:, None] + self._steps
        index = times[..., None].expand(-1, -1, self._words.shape[-1])
        words = self._words.gather(1, index)
        return words[:, :-1], words[:, 1:]

    def initial_state(self) -> tuple[Tensor, ...]:
        model = self.model()
        assert isinstance(model, (LanguageModel, Transformer))
        return model.state(self.batch_size)

    def evaluate(self, model: nn.Module) -> Evaluation:
        assert isinstance(model, (LanguageModel, Transformer))
        words = self._valid
        state = tuple(tensor.to(words.device) for tensor in model.state(words.shape[1]))
        total = torch.zeros((), dtype=torch.float64, device=words.device)
        for start in range(0, len(words) - 1, self.length):
            piece = words[start : start + self.length + 1]
            scores, state = model(piece[:-1], *state)
            scores = scores.flatten(0, 1).to(torch.float32)
            total += functional.cross_entropy(scores, piece[1:].flatten(), reduction="sum")
        return Evaluation(loss=float(total) / (words.numel() - words.shape[1]))


# -- documents

TextSplit: TypeAlias = Literal["iid", "documents", "folders"]
"""How a corpus is shared: as equal stretches of shuffled documents, as contiguous documents in the
order of their names, or by the folder that they come from, which makes workers' data differ."""
_PURPOSE = 0x5458  # keeps these draws apart from a task's others under the same seed


class TextTask(_NextTokenTask):
    """Predict the next token of text in windows drawn at random from a worker's documents.

    An epoch is a number of iterations, not a pass over the data: a worker reads its windows in an
    order of its own, pass after pass, and an epoch is where the model is evaluated.

    A batch has ``batch_size`` windows of ``length`` tokens per worker. ``steps_per_epoch`` left out
    is 250, or a pass where that is shorter; evaluations read ``num_valid`` tokens of the validation
    text. The weights of what ``model`` makes and the order of reading come from ``seed``.
    """

    def __init__(
        self,
        name: str,
        corpus: Corpus,
        num_workers: int,
        model: Callable[[], Transformer],
        *,
        batch_size: int = 16,
        length: int = 256,
        steps_per_epoch: int | None = None,
        split: TextSplit = "iid",
        num_valid: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(name, model, num_workers, batch_size, seed)
        self.length, self.split, self._corpus = length, split, corpus
        self._valid_text = corpus.valid[:num_valid]
        self._parts = share(corpus, num_workers, split, seed)
        # Windows end one token apart from the next, so that each token is a target once per pass.
        self._windows = [(len(part) - 1) // length for part in self._parts]
        for worker, windows in enumerate(self._windows):
            if windows < batch_size:
                raise DataError(
                    f"worker {worker} has {len(self._parts[worker]):,} tokens: too few for a batch "
                    f"of {batch_size} windows of {length}. Give more text or fewer workers."
                )
        self.steps_per_epoch = steps_per_epoch or min(250, min(self._windows) // batch_size)
        if len(self._valid_text) <= length:
            raise DataError(
                f"the validation text has {len(self._valid_text):,} tokens, and a window {length}."
            )

    def data(self) -> dict[str, Any]:
        return {
            "length": self.length,
            "split": self.split,
            "number of tokens": len(self._corpus.train),
            "text": digest(self._corpus.train),
        }

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        whole = np.concatenate(self._parts).astype(np.int32)
        self._tokens = torch.from_numpy(whole).to(device)
        sizes = [len(part) for part in self._parts]
        self._offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
        self._steps = torch.arange(self.length + 1, device=device)
        self._valid = torch.from_numpy(self._valid_text.astype(np.int64)).to(device)

    def tables(self, epoch: int) -> dict[str, npt.NDArray[np.generic]]:
        """Where each window of an epoch begins; a worker reads all its windows once per pass."""
        shape = self.steps_per_epoch, self.num_workers, self.batch_size
        starts = np.empty(shape, dtype=np.int64)
        first = epoch * self.steps_per_epoch * self.batch_size
        numbers = np.arange(first, first + self.steps_per_epoch * self.batch_size)
        for worker, windows in enumerate(self._windows):
            passes, places = np.divmod(numbers, windows)
            chosen = np.empty_like(numbers)
            for number in np.unique(passes):
                order = generator(self.seed, _PURPOSE, worker, int(number)).permutation(windows)
                chosen[passes == number] = order[places[passes == number]]
            begin = self._offsets[worker] + chosen * self.length
            starts[:, worker] = begin.reshape(self.steps_per_epoch, self.batch_size)
        return {"start": starts}

    def batch(self, rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        tokens = self._tokens[rows["start"].unsqueeze(-1) + self._steps].to(torch.long)
        return tokens[..., :-1], tokens[..., 1:]

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Cross-entropy per token of the validation text; its exponential is the perplexity."""
        windows = (len(self._valid) - 1) // self.length
        inputs = self._valid[: windows * self.length].view(windows, self.length)
        targets = self._valid[1 : windows * self.length + 1].view(windows, self.length)
        total = torch.zeros((), dtype=torch.float64, device=self._valid.device)
        for x, y in zip(torch.split(inputs, 32), torch.split(targets, 32), strict=True):
            scores = model(x)[0].flatten(0, 1).to(torch.float32)
            total += functional.cross_entropy(scores, y.flatten(), reduction="sum")
        return Evaluation(loss=float(total) / targets.numel())


def share(corpus: Corpus, num_workers: int, split: TextSplit, seed: int = 0) -> list[Tokens]:
    """Each worker's documents, one after another."""
    if split not in get_args(TextSplit):
        raise InputError(f"the split must be iid, documents or folders, not {split!r}")
    order = np.arange(len(corpus.starts))
    if split == "iid":
        order = generator(seed, _PURPOSE).permutation(len(order))
    if split == "folders":
        if len(corpus.folders) < 2:
            raise InputError("the split by folders needs documents in two folders or more")
        order = np.argsort(corpus.sources, kind="stable")
    ends = np.append(corpus.starts[1:], len(corpus.train))
    documents = [corpus.train[corpus.starts[k] : ends[k]] for k in order]
    # Equal numbers of tokens: the cut may fall inside a document.
    return list(np.array_split(np.concatenate(documents), num_workers))
