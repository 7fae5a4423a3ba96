"""Errors: each says in one sentence what is wrong and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib.util import find_spec


class MatchaError(Exception):
    """Base class of every error that matcha raises on purpose."""

    exit_code = 2
    """The exit code of the command line, so that scripts can tell what happened."""


class InputError(MatchaError, ValueError):
    """An argument is wrong: a budget, a name, a file."""


class TopologyError(InputError):
    """The links do not form a usable topology."""


class PlanError(InputError):
    """A plan, or a part of one, is not valid."""


class DataError(MatchaError):
    """A data set is missing or damaged."""


class WriteError(MatchaError, OSError):
    """A result could not be written: a folder that is read-only or missing, a disk that is full."""


class ModelError(InputError):
    """The model changed after its exchange was set up."""


class ExchangeError(MatchaError, RuntimeError):
    """A worker is lost: it died, or it did not answer in time."""

    exit_code = 3


class PeerLostError(ExchangeError):
    """A neighbour was lost during an exchange; the others may go on without it."""

    def __init__(self, message: str, peer: int) -> None:
        super().__init__(message)
        self.peer = peer


class WorkerError(MatchaError, RuntimeError):
    """A worker that was started here failed; its exit code becomes the launcher's."""

    def __init__(self, sentence: str, exit_code: int = 1) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


class PackageError(MatchaError, ImportError):
    """An optional package is needed and not installed."""

    exit_code = 4


_EXTRAS = {
    "torch": "torch",
    "safetensors": "torch",
    "sklearn": "torch",
    "cryptography": "keys",
    "mpi4py": "mpi",
    "matplotlib": "plot",
    "tensorboard": "tensorboard",
    "ray": "ray",
}
"""Optional packages, and the extra that installs each."""


def missing_package(error: ImportError) -> PackageError | None:
    """What to install after a failed import; None where the package is not an optional one.

    >>> print(missing_package(ImportError(name="mpi4py.MPI")))
    this needs mpi4py: pip install "matcha-sgd[mpi]"
    """
    package = (error.name or "").partition(".")[0]
    if package not in _EXTRAS:
        return None
    return PackageError(f'this needs {package}: pip install "matcha-sgd[{_EXTRAS[package]}]"')


def is_installed(package: str) -> bool:
    """Whether an optional package can be imported, without importing it."""
    return find_spec(package) is not None


def require(package: str) -> None:
    """Say that a package is missing before any work is done, not after."""
    missing = None if is_installed(package) else missing_package(ImportError(name=package))
    if missing is not None:
        raise missing


def unknown_name(kind: str, name: str, known: Iterable[str]) -> InputError:
    """An error for a misspelt name that suggests the nearest known one.

    >>> print(unknown_name("strategy", "macha", ["matcha", "vanilla"]))
    unknown strategy 'macha': did you mean 'matcha'? (known: matcha, vanilla)
    """
    choices = sorted(known)
    near = difflib.get_close_matches(name, choices, n=1, cutoff=0.4)
    hint = f": did you mean {near[0]!r}?" if near else ""
    return InputError(f"unknown {kind} {name!r}{hint} (known: {', '.join(choices)})")
