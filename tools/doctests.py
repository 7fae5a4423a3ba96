"""A griffe extension: examples in docstrings become code blocks of the reference.

Our docstrings hold doctests as plain paragraphs, as networkx has them; Markdown would read their
lines as prose.
"""

from __future__ import annotations

from typing import Any

import griffe


class Doctests(griffe.Extension):
    """Fences every doctest of every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(docstring: str) -> str:
    """The docstring with its doctests in code fences; a blank line ends a doctest."""
    lines: list[str] = []
    inside = False
    for line in docstring.splitlines():
        if not inside and line.startswith(">>>"):
            lines.append("```pycon")
            inside = True
        elif inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(line)
    if inside:
        lines.append("```")
    return "\n".join(lines)
