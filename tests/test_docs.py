"""The documentation builds without warnings and network, and every code block in it runs."""

from __future__ import annotations

import difflib
import fcntl
import html.parser
import json
import os
import pkgutil
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.blocks import INERT, PYTHON, SHELL, blocks
from tests.forks import start_script
from tests.report.browsers import chromium

import doctests
import figures
import markdown_tables
import mathml
import pictures
import reference

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
BLOCKS = str(Path(__file__).parent / "blocks.py")
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def name(page):
    return page.relative_to(ROOT).as_posix()


# -- code blocks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_is_of_a_known_kind(page):
    for block in blocks(page.read_text(encoding="utf-8")):
        assert block.language in PYTHON | SHELL | INERT, f"{name(page)}:{block.line}"


def _runs(page):
    return any(
        block.language in PYTHON | SHELL and not block.not_run
        for block in blocks(page.read_text(encoding="utf-8"))
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", [page for page in PAGES if _runs(page)], ids=name)
def test_every_block_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "log"
    environment = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}
    run = start_script(BLOCKS, str(page), environment=environment, log=log)
    try:
        assert run.wait() == 0, log.read_text()[-6000:]
    finally:
        if run.poll() is None:  # it took too long
            os.killpg(run.pid, signal.SIGKILL)
    print(log.read_text()[-4000:])


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_titled_block_is_run_by_a_shell_block_of_its_page(page):
    found = blocks(page.read_text(encoding="utf-8"))
    commands = "".join(block.text for block in found if block.language in SHELL)
    for block in found:
        if block.language in PYTHON and block.title:
            imported = f"import {Path(block.title).stem}"
            used = block.title in commands or any(imported in other.text for other in found)
            assert used, f"{name(page)}:{block.line} writes {block.title}, which nothing runs"


def test_blocks_are_found_with_their_marks():
    page = (
        "text\n\n```python\nx = 1\n```\n\n<!-- not run: needs two hosts -->\n```bash\nssh b\n```\n"
        '\n=== "tab"\n\n    ```python title="a.py"\n    y = 2\n    ```\n'
    )
    first, second, third = blocks(page)
    assert (first.line, first.language, first.text, first.not_run) == (3, "python", "x = 1\n", None)
    assert (second.language, second.not_run) == ("bash", "needs two hosts")
    assert (third.title, third.text) == ("a.py", "y = 2\n")


def test_a_failing_block_is_named_with_its_line(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("words\n\n```python\nx = 1\nraise ValueError(x)\n```\n")
    done = subprocess.run(
        [sys.executable, BLOCKS, str(page)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert f'"{page}", line 5' in done.stderr


def test_the_readme_is_short_and_its_difference_that_of_the_examples():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 100
    (change,) = (block.text for block in blocks(text) if block.language == "diff")
    examples = ((ROOT / "examples" / f"train_{name}.py").read_text() for name in ("ddp", "gossip"))
    before, after = (script.splitlines() for script in examples)
    shown = [line for line in change.splitlines() if line[0] in "+-"]
    changed = [
        line for line in difflib.ndiff(before, after) if line[0] in "+-" and line[2:].strip()
    ]
    code = [line[0] + line[2:] for line in changed if "torchrun" not in line and '"""' not in line]
    assert sorted(shown) == sorted(code)


# -- the site --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built once for all processes of this run of the tests."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "site"
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "index.html").exists():
            _build(folder)
    return folder


def _build(folder):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        # A proxy that leads nowhere: a build that fetches anything fails.
        env={**os.environ, "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"},
    )
    assert done.returncode == 0, done.stdout + done.stderr


class _Assets(html.parser.HTMLParser):
    """Addresses that a browser fetches by itself when it opens a page."""

    def __init__(self):
        super().__init__()
        self.addresses = []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag in {"script", "img", "iframe", "source", "audio", "video", "embed"}:
            self.addresses += [values.get("src"), values.get("srcset")]
        if tag == "link" and values.get("rel") not in {"canonical", "next", "prev"}:
            self.addresses.append(values.get("href"))


def test_the_site_fetches_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) >= len(PAGES) - 1
    for page in pages:
        assets = _Assets()
        assets.feed(page.read_text(encoding="utf-8"))
        outside = [a for a in assets.addresses if a and re.match(r"(https?:)?//", a)]
        assert outside == [], page.name
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", text), sheet.name


def test_a_browser_fetches_nothing_and_a_phone_shows_every_page(site):
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 390, "height": 800})
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        for path in sorted(site.rglob("*.html")):
            if path.name == "404.html":  # its addresses are those of a server's root
                continue
            page.goto(path.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, path.name
    assert [address for address in asked if not address.startswith(("file:", "data:"))] == []


def test_the_search_works_from_the_file_system(site):
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto((site / "index.html").as_uri())
        page.locator("input.md-search__input").fill("decomposition")
        page.locator(".md-search-result__item").first.wait_for()
        assert "ecomposition" in page.locator(".md-search-result__list").text_content()
        assert [a for a in asked if not a.startswith(("file:", "data:", "about:"))] == []


def test_equations_are_mathml(site):
    text = (site / "timing.html").read_text(encoding="utf-8")
    assert "<math " in text
    assert "arithmatex" not in text
    assert r"\(" not in re.sub(r'alttext="[^"]*"', "", text)


def test_every_page_is_in_the_navigation(site):
    text = (site / "index.html").read_text(encoding="utf-8")
    for page in DOCS.rglob("*.md"):
        target = page.relative_to(DOCS).with_suffix(".html").as_posix()
        assert f'href="{target}"' in text or target == "index.html", target


def test_no_page_is_in_the_navigation_twice():
    pages = re.findall(r"^ +- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.M)
    assert sorted(pages) == sorted(set(pages))


def test_the_reference_has_the_public_names(site):
    import matcha

    text = "".join(p.read_text(encoding="utf-8") for p in (site / "reference").glob("*.html"))
    for public in matcha.__all__:
        assert re.search(rf'id="matcha\.([a-z_]+\.)*{public}"', text), public


# -- figures ---------------------------------------------------------------------------------------


def test_every_figure_comes_from_the_committed_results():
    assert figures.differences() == []


def test_a_changed_result_is_noticed(tmp_path, monkeypatch):
    shutil.copytree(markdown_tables.RESULTS, tmp_path / "results")
    changed = tmp_path / "results" / "tradeoff.json"
    document = json.loads(changed.read_text())
    for point in document["points"]:
        point["consensus_error"] *= 2
    changed.write_text(json.dumps(document))
    monkeypatch.setattr(markdown_tables, "RESULTS", tmp_path / "results")
    found = "\n".join(figures.differences())
    assert "'tradeoff-table'" in found
    assert "tradeoff.svg" in found


def test_a_picture_is_the_same_when_drawn_again():
    for numbers, draw in pictures.PICTURES.values():
        data = numbers()
        assert figures.svg(draw(data), data) == figures.svg(draw(data), data)


def test_pictures_in_pages_exist_and_have_words():
    for page in PAGES:
        for words, address in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text("utf-8")):
            assert words.strip(), f"{name(page)}: {address} has no text alternative"
            assert (page.parent / address).exists(), f"{name(page)}: {address}"


# -- equations and examples ------------------------------------------------------------------------


def test_an_equation_keeps_its_source_and_refuses_what_it_cannot_say():
    assert 'alttext="a &lt; b"' in mathml.to_mathml("a < b")
    assert "<mtable" in mathml.to_mathml(r"\begin{aligned} a &= b \\ c &= d \end{aligned}")
    with pytest.raises(ValueError, match=r"\\\\foobar"):
        mathml.to_mathml(r"\foobar x")


def test_doctests_are_fenced_in_the_reference():
    fenced = doctests.fenced("Sum.\n\n>>> 1 + 1\n2\n>>> [3]\n[3]\n\nThen prose.\n\n>>> 4\n4")
    assert fenced.count("```pycon") == 2
    assert fenced.count("```") == 4
    assert "[3]\n```\n\nThen prose." in fenced


def test_the_command_reference_names_every_command():
    import typer.main

    from matcha.cli import app

    text = reference.reference()
    for command in typer.main.get_command(app).commands:
        assert f"## matcha {command} " in text
    assert "[cyan]" not in text


def test_the_walk_through_the_code_names_what_is_there():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:[a-z_]+\.)+[A-Za-z_]+(?:\.[a-z_]+)?)`", text)
    owners = [re.sub(r"(?<=[a-z_])(\.[A-Z]\w+)\.\w+$", r"\1", path) for path in paths]
    found = [pkgutil.resolve_name(f"matcha.{path}") for path in (*paths, *owners)]
    assert len(paths) > 20
    classes = {each.__name__: each for each in found if isinstance(each, type)}
    for owner, member in re.findall(r"`([A-Z][A-Za-z]+)\.([a-z_]+)`", text):
        assert hasattr(classes[owner], member), f"{owner}.{member}"
