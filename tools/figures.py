"""Fills the figures of the README and the docs from committed result files and the source.

    python tools/figures.py           # write
    python tools/figures.py --check   # say what differs, exit 1 if anything does

A page marks a region with <!-- begin:NAME --> and <!-- end:NAME -->; what stands between is made
here from benchmarks/results/. Pictures carry a fingerprint of the numbers they were drawn from, so
that a check needs no drawing (and no two versions of matplotlib need to agree on the last bit).
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

from markdown_tables import Data

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # for `reproduction`
from pictures import PICTURES  # noqa: E402
from tables import region  # noqa: E402

IMAGES = ROOT / "docs" / "images"
_REGION = re.compile(
    r"(?P<begin><!-- begin:(?P<name>[\w.:/-]+) -->\n)(?P<body>.*?)(?P<end><!-- end:(?P=name) -->)",
    flags=re.DOTALL,
)
_FINGERPRINT = re.compile(r"<!-- data: ([0-9a-f]{64}) -->")


# -- write and check -------------------------------------------------------------------------------


def pages() -> list[Path]:
    """Everything that may hold a region."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str) -> str:
    """Return a page with its regions made again.

    Raises:
        KeyError: A region has a name that nothing here makes.
    """
    return _REGION.sub(lambda m: m["begin"] + region(m["name"]) + m["end"], text)


def fingerprint(data: Data) -> str:
    """Of the numbers in a picture."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def svg(figure: Any, data: Data) -> str:
    """A figure as SVG, the same text for the same numbers, its fingerprint inside."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "matcha", "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    # Keep diffs small: matplotlib leaves spaces at the ends of lines.
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return text.replace("<svg ", f"<!-- data: {fingerprint(data)} -->\n<svg ", 1)


def differences() -> list[str]:
    """What a fresh run would change, a sentence each."""
    found = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        for match in _REGION.finditer(text):
            if match["body"] != region(match["name"]):
                place = page.relative_to(ROOT)
                found.append(f"{place}: {match['name']!r} is not what `make figures` writes.")
    for name, (numbers, _) in PICTURES.items():
        path = IMAGES / f"{name}.svg"
        stamp = _FINGERPRINT.search(path.read_text(encoding="utf-8")) if path.exists() else None
        if stamp is None or stamp[1] != fingerprint(numbers()):
            found.append(f"docs/images/{name}.svg is not what `make figures` draws.")
    return found


def write() -> None:
    """Make every region and picture again."""
    for page in pages():
        old = page.read_text(encoding="utf-8")
        new = filled(old)
        if new != old:
            page.write_text(new, encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, (numbers, draw) in PICTURES.items():
        data = numbers()
        path = IMAGES / f"{name}.svg"
        text = svg(draw(data), data)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


def main() -> None:
    """Parse, then write or check."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 on a difference"
    )
    if not parser.parse_args().check:
        write()
        return
    found = differences()
    print("\n".join(found) or "every figure agrees with benchmarks/results.")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
