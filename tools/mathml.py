"""A mkdocs hook: equations become MathML when the site is built.

Browsers draw MathML themselves, so a reader needs no JavaScript and no network. Arithmatex marks
the equations; an equation that cannot be converted is a warning, which the strict build refuses.
"""

from __future__ import annotations

import html
import logging
import re
from typing import Any

from latex2mathml.converter import convert

log = logging.getLogger("mkdocs.hooks.mathml")

_EQUATION = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">(?P<tex>.*?)</(?P=tag)>', flags=re.DOTALL
)
_DELIMITERS = ((r"\(", r"\)"), (r"\[", r"\]"))
# The converter knows this environment by another name only.
_ENVIRONMENTS = {"aligned": "align*"}
# Commands that it does not know, in those it knows.
_COMMANDS = {r"\arg": r"\operatorname{arg}"}


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Replace every marked equation of a page."""

    def replace(match: re.Match[str]) -> str:
        tex = _bare(html.unescape(match["tex"]).strip())
        try:
            return to_mathml(tex, block=match["tag"] == "div")
        except ValueError as error:
            log.warning("%s: %s", page.file.src_uri, error)
            return match[0]

    return _EQUATION.sub(replace, content)


def to_mathml(tex: str, *, block: bool = False) -> str:
    """An equation in LaTeX as MathML that carries its source for copying and screen readers.

    Raises:
        ValueError: The equation uses a command that the converter does not know.
    """
    source = tex
    for new, old in _ENVIRONMENTS.items():
        tex = tex.replace(f"{{{new}}}", f"{{{old}}}")
    for command, known in _COMMANDS.items():
        tex = re.sub(re.escape(command) + r"(?![A-Za-z])", known.replace("\\", r"\\"), tex)
    try:
        markup = convert(tex, display="block" if block else "inline")
    except Exception as error:
        raise ValueError(f"cannot convert the equation {source!r}: {error!r}") from error
    unknown = re.search(r"<m[io]>(\\[A-Za-z]+|&)</m[io]>", markup)
    if unknown:
        raise ValueError(f"cannot convert {unknown[1]!r} in the equation {source!r}")
    return str(markup).replace("<math ", f'<math alttext="{html.escape(source)}" ', 1)


def _bare(tex: str) -> str:
    for opening, closing in _DELIMITERS:
        if tex.startswith(opening) and tex.endswith(closing):
            return tex[len(opening) : -len(closing)].strip()
    return tex
