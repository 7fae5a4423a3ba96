"""The same option means the same thing in every command."""

from __future__ import annotations

import inspect
import os
from collections import defaultdict
from typing import get_args, get_type_hints
from unittest.mock import patch

import pytest
from typer.models import OptionInfo

from matcha.cli import app
from matcha.strategies import COMPARED, EFFORTS, OFFERED, STRATEGIES
from matcha.wires import WIRES


def spellings():
    """Every option of every command: all its spellings and what it takes."""
    for command in app.registered_commands:
        hints = get_type_hints(command.callback, include_extras=True)
        for name, parameter in inspect.signature(command.callback).parameters.items():
            if isinstance(parameter.default, OptionInfo):
                names = parameter.default.param_decls or ["--" + name.replace("_", "-")]
                yield tuple(names), plain(hints[name])
            elif isinstance(option := getattr(hints[name], "__metadata__", [None])[0], OptionInfo):
                # In an annotation the first spelling stands where the default would.
                decls = [d for d in (option.default, *option.param_decls) if isinstance(d, str)]
                names = decls or ["--" + name.replace("_", "-")]
                yield tuple(names), plain(get_args(hints[name])[0])


def plain(hint):
    """One value of it: of `list[int]` and of `int | None`, int; lists with commas are text."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    return kinds[0] if kinds else hint


def test_a_spelling_always_comes_with_the_same_others():
    together = defaultdict(set)
    for names, _ in spellings():
        for name in names:
            together[name].add(names)
    different = {name: found for name, found in together.items() if len(found) > 1}
    assert not different
    assert together["-t"] == {("--topology", "-t")}


def test_an_option_takes_the_same_everywhere():
    takes = defaultdict(set)
    for names, kind in spellings():
        takes[names[0]].add(kind)
    assert takes.pop("--budget") == {float, str}  # one, or several with commas
    assert takes.pop("--seed") == {int, str}
    assert not {name: found for name, found in takes.items() if len(found) > 1}


def test_a_quantity_has_one_name():
    """No plural beside a singular, no seconds beside a time."""
    names = {name for found, _ in spellings() for name in found}
    assert not {name for name in names if name + "s" in names}
    assert not {name for name in names if "seconds" in name}


def test_help_lists_what_the_registry_has(capsys):
    """Before, `plan --mixing` offered two of the mixings, and lists were written by hand."""
    said = run_help(capsys, "plan")
    for name in (*OFFERED, *WIRES[:-1], *EFFORTS):
        assert name in said, name
    taken = {m for s in STRATEGIES.values() if "mixing" in s.options() for m in s.mixings}
    assert taken == {"laplacian", "pairwise", "push", "average"}
    for mixing in taken:
        assert mixing in said
    for name in COMPARED:
        assert name in run_help(capsys, "demo")


def run_help(capsys, command):
    with patch.dict(os.environ, {"COLUMNS": "4000", "TERM": "dumb"}), pytest.raises(SystemExit):
        app([command, "--help"], prog_name="matcha")
    return capsys.readouterr().out
