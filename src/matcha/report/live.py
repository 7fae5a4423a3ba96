"""The live page: the report of runs that grow, served while they do; it ends as the report."""

from __future__ import annotations

import contextlib
import html
import ipaddress
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from matcha.errors import InputError
from matcha.plans import PlanLike
from matcha.records import Record, Run, find_runs, last_written
from matcha.report.groups import group_runs, label_runs
from matcha.report.page import build_payload, embed_json, load_runs, render
from matcha.report.series import curves, presence
from matcha.topology import Link

HEARTBEAT = "now.json"
"""In a run's directory, while it is watched: where the run is between two records."""
_BEAT_SECONDS = 0.5
_SHARE = 0.01  # of one processor's time, at most, for reading records
_SHOWN_ROUNDS = 6  # of those since a page asked last
_FAR = 2_000  # iterations; who asks more rarely is shown the last of them
_PATIENCE_SECONDS = 10.0  # for open pages to fetch the report at the end


def parse_address(where: str) -> tuple[str, int]:
    """Host and port of `[HOST:]PORT`.

    >>> parse_address("8080"), parse_address("0.0.0.0:80")
    (('127.0.0.1', 8080), ('0.0.0.0', 80))
    """
    host, _, port = where.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise InputError(f"a page is served at PORT or HOST:PORT, not at {where!r}.")
    return host.strip("[]") or "127.0.0.1", int(port)


class LivePage(ThreadingHTTPServer):
    """Serves the page of the runs in a folder, from a thread of its own.

    Only this machine is answered, or, at another address, who knows the token in `url`.

    Args:
        folder: where the runs are, or will be.
        where: `[HOST:]PORT`; port 0 is any that is free.

    Raises:
        InputError: nothing can be served there.
    """

    daemon_threads = True

    def __init__(self, folder: str | Path, where: str) -> None:
        host, port = parse_address(where)
        self.view = _View(Path(folder))
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise InputError(
                f"nothing can be served at {host}:{port} ({reason}): choose another port, or 0 "
                "for any that is free."
            ) from None
        port = int(self.server_address[1])
        self.url = f"http://{host}:{port}/"
        self._names = {f"{name}:{port}" for name in (host, "localhost", "127.0.0.1")}
        self._token = None if _is_loopback(host) else secrets.token_urlsafe(16)
        if self._token is not None:
            self.url += f"?token={self._token}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.2,), daemon=True)
        self._thread.start()

    def allows(self, host: str | None, token: str) -> bool:
        """Whether a request is a reader's; a name of another site would be that site's script."""
        if self._token is None:
            return host in self._names
        return secrets.compare_digest(token.encode(), self._token.encode())

    def finish(self, patience: float = _PATIENCE_SECONDS) -> None:
        """The runs are over: let open pages become the report, and stop serving."""
        self.view.is_over = True
        end = time.monotonic() + patience
        while self.view.has_readers and time.monotonic() < end:
            time.sleep(0.05)
        self.shutdown()
        self.server_close()
        self._thread.join()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finish(_PATIENCE_SECONDS if kind is None else 0.0)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextmanager
def heartbeat(folder: str | Path, tell: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """Write where a run is into its directory every half second, from a thread of its own."""
    over, file = threading.Event(), Path(folder) / HEARTBEAT

    def beat() -> None:
        while not over.wait(_BEAT_SECONDS):
            told = json.dumps(tell()).encode()
            with contextlib.suppress(OSError):  # a full disk must not end the training
                new = file.with_suffix(".new")
                new.write_bytes(told)
                os.replace(new, file)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        file.unlink(missing_ok=True)


class _View:
    """What is shown: read again when records have come, and not oftener than is cheap."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_over = False
        self._lock = threading.Lock()
        self._runs: list[Run] = []
        self._groups: list[tuple[Run, ...]] = []
        self._sizes: dict[Path, int] = {}
        self._due = 0.0
        self._counts: dict[Path, tuple[int, list[int]]] = {}
        self._readers: dict[str, float] = {}

    @property
    def has_readers(self) -> bool:
        """Whether a page that asked a moment ago does not know the end yet."""
        recent = time.monotonic() - _PATIENCE_SECONDS
        return any(asked > recent for asked in list(self._readers.values()))

    def forget(self, reader: str) -> None:
        """A page has all that it asked for; if it is live it asks again."""
        self._readers.pop(reader, None)

    def page(self) -> str | None:
        """The page as it is now; None before there is a run."""
        with self._lock:
            self._refresh()
            if not self._runs:
                return None
            payload = build_payload(self._runs)
            if not self.is_over:  # only the end of a run can say who won, and at which target
                payload |= {
                    "live": {"version": self._version},
                    "verdict": "Still running: nothing is decided yet.",
                    "winner": None,
                    "target": payload["target"] if payload["target_given"] else None,
                    "runs": [run | {"hit": None} for run in payload["runs"]],
                }
            return render(payload, self._runs)

    def data(self, version: str) -> str:
        """What charts show, for an open page of a version; null for what has not changed since."""
        with self._lock:
            self._refresh()
            parts, known = self._version.split("/"), version.split("/")
            labels = label_runs([group[0] for group in self._groups])
            if len(known) != len(parts):  # another run: each may have another place
                known = [""] * len(parts)
            shown = [
                None
                if part == same
                else {
                    "label": label,
                    "curves": curves(*(run.records for run in group)),
                    "presence": presence(group[0]),
                }
                for group, label, part, same in zip(self._groups, labels, parts, known, strict=True)
            ]
            return embed_json({"version": self._version, "runs": shown})

    def now(self, reader: str, since: int) -> str:
        """Where the current run is, which links met since an iteration, and what is new."""
        with self._lock:
            self._refresh()
            self._readers[reader] = time.monotonic()
            found: dict[str, Any] = {"over": self.is_over, "version": self._version}
            if self._runs:
                run = max(self._runs, key=lambda run: last_written(_folder(run)))
                found["run"] = next(k for k, group in enumerate(self._groups) if run in group)
                found |= self._current(run, since)
        return json.dumps(found, allow_nan=False)

    @property
    def _version(self) -> str:
        """A part for each group: the bytes of its records."""
        # A run may have begun between the look at the sizes and the reading.
        each = ((self._sizes.get(_folder(run), 0) for run in group) for group in self._groups)
        return "/".join(str(sum(sizes)) for sizes in each)

    def _refresh(self) -> None:
        folders = find_runs(self.folder) if self.folder.is_dir() else []
        sizes = {folder: _size(folder / "records.jsonl") for folder in folders}
        if sizes == self._sizes or (time.monotonic() < self._due and not self.is_over):
            return
        started = time.monotonic()
        with contextlib.suppress(InputError):  # a run that is just being begun
            found = load_runs([self.folder])
            # Beside runs that have records one without has nothing to show, and takes a mean away.
            self._runs = [run for run in found if run.records] or found
            self._groups = group_runs(self._runs)
            self._sizes = sizes
        now = time.monotonic()
        self._due = now + (now - started) / _SHARE

    def _current(self, run: Run, since: int) -> dict[str, Any]:
        last = run.records[-1] if run.records else Record(iteration=0, epoch=0)
        told = _heartbeat(_folder(run))
        iteration = int(told.get("iteration", 0)) or last.iteration
        found = {
            "iteration": iteration,
            "epoch": last.epoch,
            "epochs": run.header.setting("epochs"),
            "pace": last.iteration / last.time if last.time else None,
            "clock": run.header.clock,
            "members": told.get("members") or list(range(run.header.num_workers)),
        }
        if run.plan is None:
            return found
        number = {link: e for e, link in enumerate(run.plan.topology.links)}
        number = {(j, i): e for (i, j), e in number.items()} | number  # a round may turn a link
        start = min(max(since, iteration - _FAR, 0), iteration)
        rounds = [r.links for r in run.plan.rounds(start, iteration) if r][-_SHOWN_ROUNDS:]
        found["rounds"] = [sorted({number[link] for link in met}) for met in rounds]
        if run.records:
            meetings = self._count(_folder(run), run.plan, last.iteration, number)
            # What was sent is counted in all; each link has its share.
            found["meetings"] = meetings
            sent = (last.megabytes_sent or 0.0) * run.header.num_workers
            share = sent / (sum(meetings) or 1)
            found["megabytes"] = [float(f"{share * count:.5g}") for count in meetings]
        return found

    def _count(
        self, folder: Path, plan: PlanLike, iteration: int, number: Mapping[Link, int]
    ) -> list[int]:
        """How often each link of a run's plan has met before an iteration; only the new counted."""
        done, meetings = self._counts.get(folder, (0, []))
        if not meetings or iteration < done:  # resumed from an earlier checkpoint
            done, meetings = 0, [0] * len(plan.topology.links)
        for round_ in plan.rounds(done, iteration):
            for link in round_.links:
                meetings[number[link]] += 1
        self._counts[folder] = iteration, meetings
        return meetings


def _folder(run: Run) -> Path:
    assert run.path is not None, "the runs of a page were read from their folders"
    return run.path


def _heartbeat(folder: Path) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads((folder / HEARTBEAT).read_bytes())
    except (OSError, ValueError):
        return {}
    return told


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


_WAITING = (
    '<!doctype html><html lang="en"><title>matcha</title><link rel="icon" href="data:,">'
    "<p>Waiting for the first words of {}.</p></html>"
)


class _Handler(BaseHTTPRequestHandler):
    server: LivePage

    def do_GET(self) -> None:
        """Answer a page, or what an open one asks."""
        asked = urlsplit(self.path)
        query = parse_qs(asked.query)
        view, reader = self.server.view, query.get("reader", [""])[0][:40]
        if not self.server.allows(self.headers.get("Host"), query.get("token", [""])[0]):
            self._answer(403, "text/plain", "open the address that was printed, token and all.")
        elif asked.path == "/":
            page = view.page()
            if page is None:
                text = _WAITING.format(html.escape(str(view.folder)))
                self._answer(200, "text/html", text, {"Refresh": "1"})
            else:
                self._answer(200, "text/html", page)
                view.forget(reader)  # only now: the last page is awaited
        elif asked.path == "/data":
            self._answer(200, "application/json", view.data(query.get("version", [""])[0]))
        elif asked.path == "/now":
            since = query.get("since", ["0"])[0]
            text = view.now(reader, int(since) if since.isdecimal() else 0)
            self._answer(200, "application/json", text)
        else:
            self._answer(404, "text/plain", "there is one page here: /")

    def _answer(
        self, status: int, kind: str, text: str, more: Mapping[str, str] | None = None
    ) -> None:
        body = text.encode()
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            **(more or {}),
        }
        with contextlib.suppress(ConnectionError):  # the reader has closed the page
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the terminal is the run's."""
