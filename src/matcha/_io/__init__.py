"""Files that are written whole or not at all, and checked when they are read."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from matcha.errors import InputError, PlanError, WriteError

Value = TypeVar("Value")
MAX_BYTES = 512 * 2**20
_MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def write_atomically(path: Path, text: str) -> None:
    """Write a file whole or not at all, on disk before it gets its name.

    Several processes may write the same file at once: each writes its own temporary one, and the
    last to finish wins.
    """
    with replace_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a temporary file that takes a file's place once it is written and on the disk.

    Raises:
        WriteError: With the operating system's reason; the old file is left as it was.
    """
    partial = path.parent / f".{path.name}.{secrets.token_hex(6)}.partial"
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.touch(exist_ok=False)
            yield partial
            _sync(partial)
            partial.replace(path)
            _sync(path.parent)  # its name too is to outlive a power cut
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn an operating system's error about a file that cannot be written into one sentence."""
    try:
        yield
    except WriteError:
        raise
    except RuntimeError as error:
        if "inline_container" not in str(error) and "failed writing" not in str(error):
            raise
        # PyTorch's writer of archives keeps what the operating system said to itself.
        raise WriteError(
            f"cannot write {str(path)!r}: only a part could be written; make room there or choose "
            "another place."
        ) from None
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        if isinstance(error, FileExistsError):
            reason = "a file stands where its folder should be"
        raise WriteError(
            f"cannot write {str(path)!r}: {reason}; choose another place or make room there."
        ) from None


def save_document(document: dict[str, Any], path: Path) -> None:
    """Write a JSON object with a checksum, whole or not at all; `load_document` takes it back."""
    signed = {**document, "checksum": fingerprint(document)}
    write_atomically(path, json.dumps(signed, indent=1) + "\n")


def load_document(path: str | Path, make: Callable[[dict[str, Any]], Value]) -> Value:
    """Make a value of the JSON object in a file, its checksum verified and removed.

    Raises:
        PlanError: The file is missing, not JSON, not ours, damaged, or not what `make` takes.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise PlanError(f"{str(path)!r} is larger than {MAX_BYTES >> 20} MiB: not a plan.")
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{str(path)!r} cannot be read: {error.strerror}.") from None
    except PlanError:
        raise
    except (ValueError, RecursionError):
        raise PlanError(
            f"{str(path)!r} is not JSON: it is truncated, damaged or not a plan."
        ) from None
    if not isinstance(document, dict) or not str(document.get("schema", "")).startswith("matcha."):
        raise PlanError(f"{str(path)!r} is not a matcha plan (no schema name inside).")
    checksum = document.pop("checksum", None)
    if checksum is not None and checksum != fingerprint(document):
        raise PlanError(f"{str(path)!r} is damaged: its checksum does not match its content.")
    try:
        return make(document)
    except PlanError as error:
        raise PlanError(f"{str(path)!r} is not a usable plan: {error}") from None


def load_object(name: str, kind: str) -> Any:
    """What `module:object` names, with modules of the current folder found first.

    Raises:
        InputError: There is no such module, it fails, or it has no such object.
    """
    module, _, path = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(
            f"the {kind} {name!r} could not be loaded ({said}); it is MODULE:OBJECT, with the "
            "module in this folder or installed."
        ) from error
    return found


@contextmanager
def explain_malformed(kind: type[InputError]) -> Iterator[None]:
    """Turn any error while a document becomes a value into one sentence."""
    try:
        yield
    except InputError as error:
        raise kind(str(error)) from None
    except KeyError as error:
        raise kind(f"it lacks {error.args[0]!r}.") from None
    except _MALFORMED as error:
        raise kind(f"a part of it is malformed ({error}).") from None


@dataclass(frozen=True)
class Registry(Generic[Value]):
    """A registry of values that are saved by the name of their kind, users' own among them.

    >>> colors = Registry("colour", "model", "paint.register", {"grey": lambda doc: doc["share"]})
    >>> colors.from_json({"model": "grey", "share": 0.5})
    0.5
    """

    noun: str
    """What they are, as sentences say it."""
    field: str
    """Which field of a document names the kind."""
    public: str
    """The function by which users register theirs."""
    readers: dict[str, Callable[..., Value]]
    """How each kind is read, from a document and what is stored beside it."""

    def register(self, name: str, read: Callable[..., Value]) -> None:
        """Add a kind."""
        if self.readers.setdefault(name, read) is not read:
            raise InputError(f"a {self.noun} {name!r} is registered already: choose another name.")

    def to_json(self, value: Value) -> dict[str, Any]:
        """The value as JSON, after checking that `from_json` can read it back."""
        document: dict[str, Any] = value.to_json() if hasattr(value, "to_json") else {}
        if document.get(self.field) not in self.readers:
            raise PlanError(
                f"the {self.noun} {type(value).__name__} cannot be saved: give it a to_json with "
                f"a {self.field!r}, and register it with {self.public}."
            )
        return document

    def from_json(self, document: Any, *beside: Any) -> Value:
        """The value in a document."""
        if not isinstance(document, dict):
            raise PlanError(f"its {self.noun} is not an object.")
        name = document.get(self.field)
        if not isinstance(name, str) or name not in self.readers:
            raise PlanError(
                f"its {self.noun} {name!r} is unknown: plan again, or register one of your own "
                f"with {self.public} before loading."
            )
        return self.readers[name](document, *beside)


def fingerprint(document: Any) -> str:
    """A digest of plain JSON values, the same for equal values.

    >>> fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    True
    """
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def encode_number(value: Any) -> Any:
    """A number as JSON can hold it: NaN and infinities become words.

    >>> encode_number(float("inf")), encode_number(0.5)
    ('inf', 0.5)
    """
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def decode_number(value: Any) -> Any:
    """The number that `encode_number` wrote; anything else is left as it is."""
    return _WORDS.get(value, value) if isinstance(value, str) else value


def _sync(path: Path) -> None:
    """Return once a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
