"""A mkdocs hook: the reference of the command line is made from the commands themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

MARK = "<!-- commands -->"
_MARKUP = re.compile(r"\[/?(?:bold|cyan|dim|italic)?\]")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the reference where a page asks for it."""
    return markdown.replace(MARK, reference()) if MARK in markdown else markdown


def reference() -> str:
    """All commands as Markdown: what each does, its arguments and its options."""
    from typer.main import get_command

    from matcha.cli import app

    return "\n".join(_command(name, command) for name, command in _commands(get_command(app)))


def _commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every command with its name; those of a group such as `keys` one by one."""
    for name, command in sorted(group.commands.items()):
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def _command(name: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    usage = " ".join(["matcha", name, *(_metavar(p) for p in arguments), "[OPTIONS]"])
    lines = [f"## matcha {name} {{ #{name.replace(' ', '-')} }}", "", "```text", usage, "```", ""]
    lines += [_help(command.help or ""), ""]
    if arguments or options:
        lines += ["| argument or option | default | |", "| --- | --- | --- |"]
        lines += [f"| `{_metavar(p)}` | | {_cell(p.help)} |" for p in arguments]
        lines += [
            f"| `{', '.join(p.opts + p.secondary_opts)}` | {_default(p)} | {_cell(p.help)} |"
            for p in options
        ]
    return "\n".join(lines) + "\n"


def _metavar(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    return f"{name}…" if parameter.nargs == -1 else str(name)


def _default(parameter: Any) -> str:
    value = parameter.default
    if value is None or value is False or callable(value) or parameter.required:
        return ""
    return f"`{value}`" if str(value) else ""


def _help(text: str) -> str:
    """Prose as it is; the examples, which stand indented, as a block."""
    text = _MARKUP.sub("", text.replace("\b", "").replace("\f", ""))
    examples = re.findall(r"^\s+(matcha .+)$", text, flags=re.MULTILINE)
    prose = re.sub(r"^\s+matcha .+\n?", "", text, flags=re.MULTILINE)
    prose = re.sub(r"\n\s*Examples?\s*$", "", prose.rstrip(), flags=re.MULTILINE).strip()
    block = ["", "", "```text", *examples, "```"] if examples else []
    return prose + "\n".join(block)


def _cell(text: str | None) -> str:
    plain = _MARKUP.sub("", text or "")
    return " ".join(plain.split()).replace("|", r"\|")
