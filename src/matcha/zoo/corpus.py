"""A corpus of text: a folder of documents, cut into tokens and split by document."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import logging
import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from matcha._io import replace_file
from matcha.errors import DataError

Tokens: TypeAlias = npt.NDArray[np.uint16]

SUFFIXES = (".txt", ".txt.gz", ".md", ".md.gz")
_BYTES = 256
_END = "<|end|>"
_VALIDATION = 0.05
"""The share of documents held out, chosen by the hash of their names."""
_SCHEMA = "matcha.tokens/1"

_log = logging.getLogger("matcha")


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Documents as tokens, one after another, each followed by the end token."""

    train: Tokens
    valid: Tokens
    starts: npt.NDArray[np.int64]
    """Where each training document begins in `train`."""
    sources: npt.NDArray[np.int64]
    """The number of the folder that each training document comes from."""
    folders: tuple[str, ...]
    """The folders with documents, relative to the corpus, in order."""
    num_tokens: int
    """Size of the vocabulary."""
    bytes_per_token: float
    """Measured on the validation text; losses divided by this compare between vocabularies."""

    def head(self, num_train: int | None) -> Corpus:
        """The first training tokens, in whole documents as far as they go; None keeps all."""
        if num_train is None or num_train >= len(self.train):
            return self
        kept = self.starts < num_train
        return replace(
            self, train=self.train[:num_train], starts=self.starts[kept], sources=self.sources[kept]
        )


def read_corpus(folder: str | Path, *, vocabulary: int = 8192) -> Corpus:
    """Read a folder of text files, in any subfolders, and cut them into tokens.

    Tokens are byte-level BPE, learned on the training documents, where the package `tokenizers` is
    installed, and plain bytes where it is not or where `vocabulary` is 257. They are kept in a file
    beside the documents, so that the next reading takes no time; a folder with that file alone will
    do, as when it is copied to another machine.

    Args:
        folder: holds the documents: `.txt` or `.md`, plain or gzipped.
        vocabulary: number of different tokens, the end token included.

    Raises:
        DataError: The folder does not exist, or holds too few documents to split.
    """
    root = Path(folder)
    if not root.is_dir():
        raise DataError(f"{str(root)!r} is not a folder: give a folder of text files.")
    if not _BYTES < vocabulary <= 1 << 16:
        raise DataError(f"the vocabulary must have 257 to 65,536 tokens, not {vocabulary}.")
    files = sorted(p for p in root.rglob("*") if p.name.endswith(SUFFIXES) and p.is_file())
    cache = root / f".matcha-tokens-{vocabulary}.npz"
    if not files and (kept := _load(cache, None)) is not None:
        return kept
    if vocabulary > _BYTES + 1 and importlib.util.find_spec("tokenizers") is None:
        _log.warning("`tokenizers` is not installed: text is cut into bytes, not into BPE tokens.")
        vocabulary = _BYTES + 1
    key = _key(root, files, vocabulary)
    cache = root / f".matcha-tokens-{vocabulary}.npz"
    found = _load(cache, key)
    if found is None:
        found = _encode(root, files, vocabulary)
        _save(cache, key, found)
    return found


def _key(root: Path, files: list[Path], vocabulary: int) -> str:
    """Changes with the documents' names and sizes."""
    named = [f"{file.relative_to(root)} {file.stat().st_size}" for file in files]
    return hashlib.sha256("\n".join([_SCHEMA, str(vocabulary), *named]).encode()).hexdigest()


def _read(file: Path) -> str:
    data = file.read_bytes()
    try:
        data = gzip.decompress(data) if file.suffix == ".gz" else data
    except (OSError, EOFError) as error:
        raise DataError(f"{str(file)!r} is not a readable gzip file: {error}") from None
    return data.decode("utf-8", errors="replace")


def _is_held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") < _VALIDATION * 2**32


def _encode(root: Path, files: list[Path], vocabulary: int) -> Corpus:
    if len(files) < 2:
        raise DataError(
            f"{str(root)!r} holds {len(files)} text files ({', '.join(SUFFIXES)}): training and "
            "validation need at least one each."
        )
    names = [file.relative_to(root) for file in files]
    out = [k for k, name in enumerate(names) if _is_held_out(name.as_posix())] or [len(files) - 1]
    kept = [k for k in range(len(files)) if k not in out] or [out.pop(0)]
    texts = [_read(file) for file in files]
    encoded = _tokenize(texts, [texts[k] for k in kept], vocabulary)
    parents = [name.parent.as_posix() for name in names]
    folders = tuple(sorted(set(parents)))
    valid = np.concatenate([encoded[k] for k in out])
    num_bytes = sum(len(texts[k].encode("utf-8", errors="replace")) for k in out)
    lengths = [len(encoded[k]) for k in kept]
    return Corpus(
        train=np.concatenate([encoded[k] for k in kept]),
        valid=valid,
        starts=np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64),
        sources=np.array([folders.index(parents[k]) for k in kept], dtype=np.int64),
        folders=folders,
        num_tokens=vocabulary,
        bytes_per_token=num_bytes / max(1, len(valid)),
    )


def _tokenize(texts: list[str], train: list[str], vocabulary: int) -> list[Tokens]:
    if vocabulary == _BYTES + 1:
        return [
            np.append(np.frombuffer(text.encode(), np.uint8), _BYTES).astype(np.uint16)
            for text in texts
        ]
    from tokenizers import ByteLevelBPETokenizer

    tokenizer: Any = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        train, vocab_size=vocabulary, special_tokens=[_END], show_progress=False
    )
    end = tokenizer.token_to_id(_END)
    return [
        np.array([*encoding.ids, end], dtype=np.uint16)
        for encoding in tokenizer.encode_batch(texts)
    ]


_ARRAYS = ("train", "valid", "starts", "sources")
_FACTS = ("folders", "num_tokens", "bytes_per_token")


def _save(cache: Path, key: str, corpus: Corpus) -> None:
    facts = {"key": key} | {name: getattr(corpus, name) for name in _FACTS}
    arrays = {name: getattr(corpus, name) for name in _ARRAYS}
    try:
        with replace_file(cache) as partial, open(partial, "wb") as file:
            np.savez_compressed(file, facts=np.array(json.dumps(facts)), **arrays)
    except OSError as error:
        _log.warning("the tokens are not kept for the next time: %s", error)


def _load(cache: Path, key: str | None) -> Corpus | None:
    """The kept tokens, where they are of the same documents; None: of any."""
    try:
        with cache.open("rb") as file, np.load(file) as held:
            facts = json.loads(str(held["facts"]))
            if facts.pop("key") != key and key is not None:
                return None
            facts["folders"] = tuple(facts["folders"])
            return Corpus(**facts, **{name: held[name] for name in _ARRAYS})
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error):
        return None  # there is none, or it was cut short: read the documents again
