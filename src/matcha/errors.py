"""What can go wrong, said in one sentence that tells the user what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MatchaError(Exception):
    """Base class of every error that matcha raises on purpose."""


class InputError(MatchaError, ValueError):
    """An argument is wrong: a budget, a name, a file."""


class TopologyError(InputError):
    """The links do not form a usable topology."""


class PlanError(InputError):
    """A plan, or a part of one, is not valid."""


class DataError(MatchaError):
    """A data set is missing or damaged."""


class ExchangeError(MatchaError, RuntimeError):
    """A worker could not complete an exchange with a peer."""


class WriteError(MatchaError, OSError):
    """A result could not be written: a folder that is read-only or missing, a disk that is full."""


class PeerLostError(ExchangeError):
    """A neighbour is gone in the middle of something; a team that goes on does so without it."""

    def __init__(self, message: str, peer: int) -> None:
        super().__init__(message)
        self.peer = peer


def unknown_name(kind: str, name: str, known: Iterable[str]) -> InputError:
    """An error for a misspelt name that suggests the nearest known one.

    >>> print(unknown_name("strategy", "macha", ["matcha", "vanilla"]))
    unknown strategy 'macha': did you mean 'matcha'? (known: matcha, vanilla)
    """
    choices = sorted(known)
    near = difflib.get_close_matches(name, choices, n=1, cutoff=0.4)
    hint = f": did you mean {near[0]!r}?" if near else ""
    return InputError(f"unknown {kind} {name!r}{hint} (known: {', '.join(choices)})")
