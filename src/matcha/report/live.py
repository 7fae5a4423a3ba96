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
from matcha.records import Run, find_runs
from matcha.report.groups import Group, group_runs, label_groups
from matcha.report.page import build_payload, embed_json, load_runs, render
from matcha.report.series import mean_curves, presence
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


class LivePage:
    """Serves the page of the runs in a folder, from a thread of its own.

    Only this machine is answered, or, at another address, who knows the token in `url`.

    Args:
        folder: where the runs are, or will be.
        where: `[HOST:]PORT`; port 0 is any that is free.

    Raises:
        InputError: nothing can be served there.
    """

    def __init__(self, folder: str | Path, where: str) -> None:
        self.folder = Path(folder)
        host, port = parse_address(where)
        self._view = _View(self.folder)
        self._server = _Server(host, port, self._view)
        self.url = self._server.url
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True
        )
        self._thread.start()

    def finish(self, patience: float = _PATIENCE_SECONDS) -> None:
        """The runs are over: let open pages become the report, and stop serving."""
        self._view.is_over = True
        end = time.monotonic() + patience
        while self._view.has_readers and time.monotonic() < end:
            time.sleep(0.05)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> LivePage:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finish(_PATIENCE_SECONDS if kind is None else 0.0)


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
        self._groups: list[Group] = []
        self._seen: dict[Path, int] = {}
        self._due = 0.0
        self._counted: dict[Path, _Traffic] = {}
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
            return render(payload if self.is_over else self._undecided(payload), self._runs)

    def _undecided(self, payload: dict[str, Any]) -> dict[str, Any]:
        """The page's data without what only the end of a run can say."""
        target = payload["target"] if payload["target_given"] else None
        return payload | {
            "live": {"version": self._version},
            "verdict": "Still running: nothing is decided yet.",
            "winner": None,
            "target": target,
            "runs": [run | {"hit": None} for run in payload["runs"]],
        }

    def data(self, version: str) -> str:
        """What charts show, for an open page of a version; null for what has not changed since."""
        with self._lock:
            self._refresh()
            parts, known = self._version.split("/"), version.split("/")
            labels = label_groups(self._groups)
            if len(known) != len(parts):  # another run: each may have another place
                known = [""] * len(parts)
            shown = [
                None
                if part == same
                else {
                    "label": label,
                    "curves": mean_curves(group.runs),
                    "presence": presence(group.runs[0]),
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
                found |= self._current(since)
        return json.dumps(found, allow_nan=False)

    @property
    def _version(self) -> str:
        """A part for each group: the bytes of its records."""
        sizes = ((self._seen[run.path] for run in group.runs if run.path) for group in self._groups)
        return "/".join(str(sum(each)) for each in sizes)

    def _refresh(self) -> None:
        folders = find_runs(self.folder) if self.folder.is_dir() else []
        sizes = {folder: _size(folder / "records.jsonl") for folder in folders}
        if sizes == self._seen or (time.monotonic() < self._due and not self.is_over):
            return
        started = time.monotonic()
        with contextlib.suppress(InputError):  # a run that is just being begun
            found = load_runs([self.folder])
            # Beside runs that have records one without has nothing to show, and takes a mean away.
            self._runs = [run for run in found if run.records] or found
            self._groups = group_runs(self._runs)
            self._seen = sizes
        now = time.monotonic()
        self._due = now + (now - started) / _SHARE

    def _current(self, since: int) -> dict[str, Any]:
        run = max(self._runs, key=lambda one: _last_written(one.path))
        place = next(k for k, group in enumerate(self._groups) if run in group.runs)
        last = run.records[-1] if run.records else None
        told = _heartbeat(run.path)
        iteration = int(told.get("iteration", 0)) or (last.iteration if last else 0)
        epochs = run.header.setting("epochs")
        found: dict[str, Any] = {
            "run": place,
            "iteration": iteration,
            "epoch": last.epoch if last else 0,
            "epochs": epochs,
            "pace": last.iteration / last.time if last and last.time else None,
            "clock": run.header.clock,
            "members": told.get("members") or list(range(run.header.num_workers)),
        }
        if run.plan is not None and run.path is not None:
            index = {link: e for e, link in enumerate(run.plan.topology.links)}
            start = min(max(since, iteration - _FAR, 0), iteration)
            rounds = [r.links for r in run.plan.rounds(start, iteration) if r]
            found["rounds"] = [
                sorted({_index(index, link) for link in links}) for links in rounds[-_SHOWN_ROUNDS:]
            ]
            traffic = self._counted.setdefault(run.path, _Traffic(run, index))
            found |= traffic.upto(run)
        return found


class _Traffic:
    """How often each link of a run's plan has met, and what it carried of all that was sent."""

    def __init__(self, run: Run, index: Mapping[Link, int]) -> None:
        self._index = index
        self._done = 0
        self._meetings = [0] * len(index)

    def upto(self, run: Run) -> dict[str, Any]:
        """Up to the run's last record."""
        if not run.records or run.plan is None:
            return {}
        last = run.records[-1]
        if last.iteration < self._done:  # resumed from an earlier checkpoint
            self._done, self._meetings = 0, [0] * len(self._index)
        for round_ in run.plan.rounds(self._done, last.iteration):
            for link in round_.links:
                self._meetings[_index(self._index, link)] += 1
        self._done = last.iteration
        total = sum(self._meetings)
        sent = (last.megabytes_sent or 0.0) * run.header.num_workers
        share = sent / total if total else 0.0
        return {
            "meetings": self._meetings,
            "megabytes": [float(f"{share * count:.5g}") for count in self._meetings],
        }


def _index(index: Mapping[Link, int], link: Link) -> int:
    i, j = link
    return index[link] if link in index else index[j, i]


def _heartbeat(path: Path | None) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads(((path or Path()) / HEARTBEAT).read_bytes())
    except (OSError, ValueError):
        return {}
    return told


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _last_written(path: Path | None) -> float:
    files = [] if path is None else [path / HEARTBEAT, path / "records.jsonl", path / "run.json"]
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, view: _View) -> None:
        self.view = view
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise InputError(
                f"nothing can be served at {host}:{port} ({reason}): choose another port, or 0 "
                "for any that is free."
            ) from None
        port = int(self.server_address[1])
        self.token = None if _is_loopback(host) else secrets.token_urlsafe(16)
        self.names = {f"{name}:{port}" for name in (host, "localhost", "127.0.0.1")}
        self.url = f"http://{host}:{port}/"
        if self.token is not None:
            self.url += f"?token={self.token}"

    def allows(self, host: str | None, token: str) -> bool:
        """Whether a request is a reader's; a name of another site would be that site's script."""
        if self.token is None:
            return host in self.names
        return secrets.compare_digest(token.encode(), self.token.encode())


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


_WAITING = (
    '<!doctype html><html lang="en"><title>matcha</title><link rel="icon" href="data:,">'
    "<p>Waiting for the first words of {}.</p></html>"
)


class _Handler(BaseHTTPRequestHandler):
    server: _Server

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
