"""What commands share: tables, progress that waits a second, files that are not overwritten."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from matcha._io import explain_write_errors
from matcha._io.tables import Table
from matcha._numerics import ProgressCallback
from matcha.errors import InputError, WriteError

if TYPE_CHECKING:
    from matcha.records import Run
    from matcha.report import Comparison

console = Console()
_PATIENCE_SECONDS = 1.0
_WORD_SECONDS = 10.0  # without a terminal, a log still says what takes so long


def print_json(document: Any) -> None:
    """One JSON document on standard output, for machines."""
    print(json.dumps(document, indent=1))


def check_free(path: Path | None, force: bool) -> None:
    """Refuse, before any work, a file that exists or cannot be written."""
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"{str(path)!r} is a folder: give the name of a file.")
    if path.exists() and not force:
        raise InputError(f"{str(path)!r} exists: choose another name, or --force to overwrite it.")
    check_writable(path.parent, path)


def check_places(
    force: bool, *, output: Path | None = None, plot: Path | None = None, page: Path | None = None
) -> None:
    """Refuse, before any work, files that exist, cannot be written or have a wrong ending."""
    for path in (output, plot, page):
        check_free(path, force)
    if plot is not None:
        from matcha.report.figures import check_format

        check_format(plot)
    if page is not None and page.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"{str(page)!r} would be a page for a browser: end it in .html.")


def check_writable(folder: Path, path: Path) -> None:
    """Refuse, before any work, a place where nothing can be written."""
    with explain_write_errors(path):
        nearest = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        if not nearest.is_dir():
            raise FileExistsError
        with tempfile.TemporaryFile(dir=nearest):
            pass


class Results:
    """Files that a command writes; what cannot be written goes to a temporary folder."""

    def __init__(self) -> None:
        self.written: list[Path] = []
        self.lost: list[str] = []

    def write(self, path: Path | None, write: Callable[[Path], object]) -> None:
        """Let a function write a file, if it was asked for."""
        if path is None:
            return
        try:
            write(path)
        except WriteError as error:
            other = Path(tempfile.mkdtemp(prefix="matcha-")) / path.name
            write(other)
            self.lost.append(f"{str(error).rstrip('.')} (the result is in {str(other)!r}).")
            path = other
        self.written.append(path)

    def plot(self, path: Path | None, draw: Callable[[], object]) -> None:
        """Draw a figure, if it was asked for, and write it."""
        from matcha.report.figures import save_figure

        self.write(path, lambda place: save_figure(draw(), place))

    def page(self, path: Path | None, runs: Sequence[Run | Path], **options: Any) -> None:
        """Write the page of some runs, with the options of `write_report`, if it was asked for."""
        from matcha.report import write_report

        if path is not None:
            with patient_progress("writing the report") as progress:
                self.write(path, lambda to: write_report(runs, to, progress=progress, **options))

    def say(self) -> None:
        """Print where the files went."""
        for path in self.written:
            console.print(f"wrote [cyan]{path}[/]", highlight=False)


@contextmanager
def keeping() -> Iterator[Results]:
    """Write results so that none is lost; what went elsewhere is an error when all is done."""
    results = Results()
    yield results
    if results.lost:
        raise WriteError(" ".join(results.lost))


def make_folder(path: Path) -> None:
    """Make a folder for results before the work that fills it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be a folder: {error.strerror}.") from None
    check_writable(path, path)


def free_directory(root: Path, stem: str) -> Path:
    """A directory below `root` that does not exist yet."""
    names = (stem if n == 1 else f"{stem}-{n}" for n in itertools.count(1))
    return next(path for name in names if not (path := root / name).exists())


def print_table(found: Table, title: str | None = None, sections: Container[int] = ()) -> None:
    """Print a table; some of its rows begin a section."""
    table = RichTable(title=title, title_justify="left")
    for heading, right in zip(found.headings, found.numeric, strict=True):
        table.add_column(heading, justify="right" if right else "left")
    for number, cells in enumerate(found.rows):
        if number in sections:
            table.add_section()
        table.add_row(*cells)
    console.print(table)


def print_comparison(comparison: Comparison, title: str) -> None:
    """Print a comparison in as many columns as fit without a cell or a word cut short."""
    cells = {c: found for c, found in comparison.cells().items() if c.spare is not None}
    headings = {column: column.brief or column.heading for column in cells}
    whole = {c: max(map(len, [headings[c], *found])) for c, found in cells.items()}
    narrow = {c: max(map(len, [*headings[c].split(), *found])) for c, found in cells.items()}
    room = console.width - max(map(len, comparison.names))
    widths = whole if sum(width + 2 for width in whole.values()) <= room else narrow
    for column in sorted(cells, key=lambda c: -(c.spare or 0)):
        if column.spare and sum(widths[c] + 2 for c in cells) > room:
            del cells[column]
    table = RichTable(
        title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False
    )
    table.add_column("run", no_wrap=True)
    for column in cells:
        table.add_column(headings[column], justify="right", width=widths[column])
    for row in zip(comparison.names, *cells.values(), strict=True):
        table.add_row(*row)
    console.print(table)
    console.print(f"\n{comparison.verdict.sentence}\n", highlight=False)


def print_notes(notes: Iterable[str]) -> None:
    """A plan's notes, whose lines stand below one another."""
    for note in notes:
        first, *rest = textwrap.wrap(note, max(console.width, 40) - 8, break_on_hyphens=False)
        console.print(f"  [yellow]note:[/] {first}", highlight=False)
        for line in rest:
            console.print(f"        {line}", highlight=False, markup=False)


@contextmanager
def serving(folder: Path, where: str | None) -> Iterator[None]:
    """Serve the page of the runs in a folder inside it, if that was asked for."""
    if where is None:
        yield
        return
    from matcha.report.live import LivePage

    with LivePage(folder, where) as page:
        print(f"matcha: live at {page.url}", file=sys.stderr, flush=True)
        yield


@contextmanager
def patient_progress(title: str) -> Iterator[ProgressCallback]:
    """A progress bar on standard error that appears when work takes more than a second.

    Where standard error is not a terminal, a line every ten seconds says what is being done.
    """
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[words]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    bar.add_task(title, total=None, words="")
    (task,) = bar.tasks

    def show(done: int, total: int, steps: str) -> None:
        words = f"{done} of {total} {steps}"
        bar.update(task.id, completed=done, total=total, words=words)

    patience = _repeating(_PATIENCE_SECONDS, bar.start) if sys.stderr.isatty() else nullcontext()
    try:
        with (
            said_in_log(lambda: f"matcha: still {title} … {task.fields['words']}".rstrip()),
            patience,
        ):
            yield show
    finally:
        if bar.live.is_started:
            bar.stop()


@contextmanager
def said_in_log(sentence: Callable[[], str]) -> Iterator[None]:
    """Print a sentence every ten seconds where standard error is not a terminal."""
    stream = sys.stderr
    if stream.isatty():
        yield
        return
    with _repeating(_WORD_SECONDS, lambda: print(sentence(), file=stream, flush=True)):
        yield


@contextmanager
def _repeating(seconds: float, act: Callable[[], object]) -> Iterator[None]:
    """Do something every so many seconds, in a thread, until the work inside has ended."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(seconds):
            act()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
