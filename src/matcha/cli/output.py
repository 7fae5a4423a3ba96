"""What commands share: tables, progress that waits a second, files that are not overwritten."""

from __future__ import annotations

import json
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from matcha._io import explain_write_errors
from matcha.errors import InputError, WriteError
from matcha.plans import Plan, PlanLike

console = Console()
_PATIENCE_SECONDS = 1.0
_WORD_SECONDS = 10.0  # without a terminal, a log still says what takes so long


def print_json(document: Any) -> None:
    """One JSON document on standard output, for machines."""
    print(json.dumps(document, indent=1))


def check_free(path: Path | None, force: bool) -> None:
    """Refuse, before any work, a file that exists or cannot be written.

    Raises:
        InputError: The file exists and may not be overwritten, or it is a folder.
        WriteError: Nothing can be written there.
    """
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"{str(path)!r} is a folder: give the name of a file.")
    if path.exists() and not force:
        raise InputError(f"{str(path)!r} exists: choose another name, or --force to overwrite it.")
    check_writable(path.parent, path)


def check_page(path: Path | None) -> None:
    """Refuse a page whose name says that it is something else.

    Raises:
        InputError: It does not end in .html.
    """
    if path is not None and path.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"{str(path)!r} would be a page for a browser: end it in .html.")


def check_writable(folder: Path, path: Path) -> None:
    """Refuse, before any work, a place where nothing can be written.

    Raises:
        WriteError: Says what the operating system said.
    """
    with explain_write_errors(path):
        nearest = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        if not nearest.is_dir():
            raise FileExistsError
        with tempfile.TemporaryFile(dir=nearest):
            pass


Keep: TypeAlias = Callable[[Path, Callable[[Path], object]], Path]
"""Takes a file's path and a function that writes it; returns where the file went."""


@contextmanager
def keeping() -> Iterator[Keep]:
    """Write results so that none is lost: what cannot be written goes to a temporary folder.

    Yields a function of a file and of what writes it, which says where the file went. After all
    else was done and printed, whatever went elsewhere is an error.

    Raises:
        WriteError: Names the places that could not be written, and where the results are.
    """
    lost: list[str] = []

    def keep(path: Path, write: Callable[[Path], object]) -> Path:
        try:
            write(path)
        except WriteError as error:
            other = Path(tempfile.mkdtemp(prefix="matcha-")) / path.name
            write(other)
            lost.append(f"{str(error).rstrip('.')} (the result is in {str(other)!r}).")
            return other
        return path

    yield keep
    if lost:
        raise WriteError(" ".join(lost))


def make_folder(path: Path) -> None:
    """Make a folder for results before the work that fills it.

    Raises:
        InputError: It cannot be made there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be a folder: {error.strerror}.") from None
    check_writable(path, path)


def free_directory(root: Path, stem: str) -> Path:
    """A directory below `root` that does not exist yet.

    Raises:
        InputError: There are too many already.
    """
    for number in range(1, 10_000):
        path = root / (stem if number == 1 else f"{stem}-{number}")
        if not path.exists():
            return path
    raise InputError(f"{str(root)!r} is full of {stem}: clear it or choose --output.")


def rho_in_words(plan: Plan) -> str:
    """ρ, marked where it is a mean over a cycle: the two kinds do not compare."""
    return f"{plan.rho:.4f}" if plan.rho_kind == "step" else f"{plan.rho:.4f}*"


def explain_marks(plans: Iterable[Plan]) -> None:
    """Say below a table what the mark of `rho_in_words` means, where there is one."""
    if any(plan.rho_kind != "step" for plan in plans):
        console.print("*: a mean over a cycle of rounds; it does not compare with that of a step.")


def print_notes(notes: Iterable[str]) -> None:
    """A plan's notes, whose lines stand below one another."""
    for note in notes:
        first, *rest = textwrap.wrap(note, max(console.width, 40) - 8, break_on_hyphens=False)
        console.print(f"  [yellow]note:[/] {first}", highlight=False)
        for line in rest:
            console.print(f"        {line}", highlight=False, markup=False)


def explain_averages(plans: Iterable[PlanLike]) -> None:
    """Say below a table what exact averages are charged for, where there are some."""
    averaging = [plan for plan in plans if isinstance(plan, Plan) and plan.process.is_all_reduce]
    if averaging:
        names = " and ".join(dict.fromkeys(plan.strategy for plan in averaging))
        verb = "are" if " and " in names else "is"
        where = averaging[0].topology.name or "these links"
        console.print(f"{names} {verb} charged for a ring all-reduce on {where}.")


def this_command(*more: str) -> list[str]:
    """This very command for Python, with further arguments: each worker runs it again."""
    return ["-m", "matcha.cli", *sys.argv[1:], *more]


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


class Steps:
    """How far work is, as a bar on standard error shows it and a log says it."""

    def __init__(self, title: str, *, watched: bool) -> None:
        self.title = title
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[words]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not watched,
        )
        self._task = self.bar.add_task(title, total=None, words="")

    def __call__(self, done: int, total: int, steps: str) -> None:
        """Show how many steps are done, how many there are, and what they are."""
        words = f"{done} of {total} {steps}"
        self.bar.update(self._task, completed=done, total=total, words=words)

    def sentence(self) -> str:
        """What a log says."""
        return f"matcha: still {self.title} … {self.bar.tasks[0].fields['words']}".rstrip()


@contextmanager
def patient_progress(title: str) -> Iterator[Steps]:
    """A progress bar on standard error that appears when work takes more than a second.

    Where standard error is not a terminal, a line every ten seconds says what is being done.
    """
    watched = sys.stderr.isatty()
    steps = Steps(title, watched=watched)
    if not watched:
        with said_in_log(steps.sentence):
            yield steps
        return
    timer = threading.Timer(_PATIENCE_SECONDS, steps.bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield steps
    finally:
        timer.cancel()
        timer.join()
        if steps.bar.live.is_started:
            steps.bar.stop()


@contextmanager
def said_in_log(sentence: Callable[[], str]) -> Iterator[None]:
    """Print a sentence every ten seconds where standard error is not a terminal."""
    ended, stream = threading.Event(), sys.stderr

    def speak() -> None:
        while not ended.wait(_WORD_SECONDS):
            print(sentence(), file=stream, flush=True)

    speaker = threading.Thread(target=speak, daemon=True)
    if not stream.isatty():
        speaker.start()
    try:
        yield
    finally:
        ended.set()
        if speaker.is_alive():
            speaker.join()
