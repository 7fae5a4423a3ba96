"""The same option means the same thing in every command."""

from __future__ import annotations

import inspect
from collections import defaultdict
from typing import get_args, get_type_hints

from typer.models import OptionInfo

from matcha.cli import app


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
                yield (option.default, *option.param_decls), plain(get_args(hints[name])[0])


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
    assert not {name: found for name, found in takes.items() if len(found) > 1}


def test_a_quantity_has_one_name():
    """No plural beside a singular, no seconds beside a time."""
    names = {name for found, _ in spellings() for name in found}
    assert not {name for name in names if name + "s" in names}
    assert not {name for name in names if "seconds" in name}
