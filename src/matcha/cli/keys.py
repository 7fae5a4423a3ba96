"""`matcha keys`: certificates for workers whose links cross networks that cannot be trusted."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from matcha._io.tables import Table
from matcha.cli import app
from matcha.cli import options as opt
from matcha.cli.help import Command, Group
from matcha.cli.output import print_json, print_table

if TYPE_CHECKING:
    from matcha._io.keys import KeyCertificate

keys_app = typer.Typer(
    cls=Group, no_args_is_help=True, help="Make, show, renew and revoke workers' keys."
)
app.add_typer(keys_app, name="keys")

_DIRECTORY = typer.Argument(..., help="The directory of keys.")
_DAYS = typer.Option(365.0, help="Days until the certificates expire.")
_WORKER = typer.Option(..., "--worker", help="The worker's number; may be given several times.")


@keys_app.command("new", cls=Command)
def new(
    directory: Path = _DIRECTORY,
    workers: int = typer.Option(..., help="How many workers."),
    days: float = _DAYS,
    as_json: bool = opt.JSON,
) -> None:
    """Make an authority and a certificate for each worker.

    Give each worker [cyan]authority.pem[/] and its own two files, [cyan]worker-3.pem[/] and
    [cyan]worker-3.key[/]. Keep [cyan]authority.key[/] away from all of them.

    [bold]Example[/]

      matcha keys new keys --workers 8
    """
    from matcha._io import keys

    _print(keys.new_keys(directory, workers, days=days), as_json)


@keys_app.command("show", cls=Command)
def show(directory: Path = _DIRECTORY, as_json: bool = opt.JSON) -> None:
    """Say what a directory of keys holds and until when."""
    from matcha._io import keys

    _print(keys.read_certificates(directory), as_json)


@keys_app.command("renew", cls=Command)
def renew(
    directory: Path = _DIRECTORY,
    worker: list[int] = _WORKER,
    days: float = _DAYS,
    as_json: bool = opt.JSON,
) -> None:
    """Make a new certificate for a worker and revoke its old one."""
    from matcha._io import keys

    for rank in worker:
        keys.issue(directory, rank, days=days)
    _print(keys.read_certificates(directory), as_json)


@keys_app.command("revoke", cls=Command)
def revoke(
    directory: Path = _DIRECTORY, worker: list[int] = _WORKER, as_json: bool = opt.JSON
) -> None:
    """Refuse a worker's certificate from now on.

    Copy [cyan]revoked.txt[/] into every worker's directory of keys: they read it again within a
    second, and links of that certificate end.
    """
    from matcha._io import keys

    keys.revoke(directory, worker)
    _print(keys.read_certificates(directory), as_json)


def _print(certificates: list[KeyCertificate], as_json: bool) -> None:
    if as_json:
        times = [{"start": c.start.isoformat(), "end": c.end.isoformat()} for c in certificates]
        print_json([asdict(c) | t for c, t in zip(certificates, times, strict=True)])
        return
    now = datetime.now(timezone.utc)
    rows = []
    for c in certificates:
        state = "revoked" if c.revoked else "expired" if c.end < now else "valid"
        rows.append((c.name, f"{c.end:%Y-%m-%d %H:%M}", state, f"{c.fingerprint[:32]}…"))
    print_table(Table(("", "valid until", "state", "fingerprint (SHA-256)"), rows))
