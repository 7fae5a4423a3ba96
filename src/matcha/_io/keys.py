"""Keys: one authority per run, one certificate per worker, so that links know their other end.

A directory of keys holds `authority.pem` and `authority.key`, `worker-3.pem` and `worker-3.key` for
each worker, and `revoked.txt`. A worker needs `authority.pem`, its own two files and, if there is
one, `revoked.txt`; `authority.key` makes new workers and belongs on no worker.
"""

from __future__ import annotations

import hashlib
import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from matcha._io import write_atomically
from matcha.errors import InputError, require

_IDENTITY = "matcha:worker:"  # in a certificate's alternative names, before the worker's number
_AUTHORITY = "authority"
_CLOCKS = timedelta(minutes=10)  # how far workers' clocks may lie apart


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyCertificate:
    """What a certificate in a directory of keys says."""

    name: str
    worker: int | None
    """None for the authority."""
    start: datetime
    end: datetime
    fingerprint: str
    """SHA-256 of the certificate: what a list of revoked ones holds."""
    revoked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """One worker's view of a directory of keys: its identity and the authority that it trusts."""

    directory: Path
    rank: int

    def __post_init__(self) -> None:
        for name in (f"{_AUTHORITY}.pem", f"{self._name}.pem", f"{self._name}.key"):
            if not (self.directory / name).is_file():
                raise InputError(
                    f"{str(self.directory)!r} lacks {name!r}: make keys with "
                    f"`matcha keys new {self.directory} --workers N` and give each worker its own."
                )

    @property
    def _name(self) -> str:
        return f"worker-{self.rank}"

    def context(self, *, server: bool) -> ssl.SSLContext:
        """TLS 1.3 in which both ends must show a certificate of our authority."""
        kind = ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT
        context = ssl.SSLContext(kind)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # a worker is known by its number, not by where it runs
        context.verify_mode = ssl.CERT_REQUIRED
        if server:
            context.num_tickets = 0  # no session is resumed: a new link is a new handshake
        try:
            context.load_verify_locations(self.directory / f"{_AUTHORITY}.pem")
            context.load_cert_chain(
                self.directory / f"{self._name}.pem", self.directory / f"{self._name}.key"
            )
        except (ssl.SSLError, OSError) as error:
            raise InputError(
                f"the keys in {str(self.directory)!r} cannot be used: {error}."
            ) from None
        return context

    def revoked(self) -> frozenset[str]:
        """Fingerprints that are refused; read again each time, so the list can be replaced."""
        return _revoked(self.directory)


def worker_of(certificate: Any) -> int | None:
    """The worker that a verified certificate (`SSLSocket.getpeercert()`) is for; None: no worker.

    >>> worker_of({"subjectAltName": (("URI", "matcha:worker:3"),)})
    3
    """
    for kind, value in (certificate or {}).get("subjectAltName", ()):
        if kind == "URI" and value.startswith(_IDENTITY) and value[len(_IDENTITY) :].isdigit():
            return int(value[len(_IDENTITY) :])
    return None


def new_keys(
    directory: str | Path, num_workers: int, *, days: float = 365.0
) -> list[KeyCertificate]:
    """Make an authority and a certificate for each worker."""
    root = Path(directory)
    if num_workers < 1:
        raise InputError(f"keys are for at least one worker, not {num_workers}.")
    if (root / f"{_AUTHORITY}.pem").exists():
        raise InputError(f"{str(root)!r} holds an authority already: choose another directory.")
    root.mkdir(parents=True, exist_ok=True)
    for rank in (None, *range(num_workers)):
        _certify(root, rank, days)
    return read_certificates(root)


def issue(directory: str | Path, rank: int, *, days: float = 365.0) -> None:
    """Make a (new) certificate for one worker; an earlier one is revoked."""
    root = Path(directory)
    if not (root / f"{_AUTHORITY}.key").exists():
        raise InputError(f"{str(root)!r} lacks the authority's key, which alone makes workers.")
    if (root / f"worker-{rank}.pem").exists():
        revoke(root, [rank])
    _certify(root, rank, days)


def revoke(directory: str | Path, workers: Sequence[int]) -> None:
    """Add workers' present certificates to the list of revoked ones."""
    root = Path(directory)
    known = {c.worker: c.fingerprint for c in read_certificates(root)}
    for rank in workers:
        if rank not in known:
            raise InputError(f"{str(root)!r} holds no certificate of worker {rank}.")
    listed = sorted(_revoked(root) | {known[rank] for rank in workers})
    write_atomically(root / "revoked.txt", "".join(f"{line}\n" for line in listed))


def read_certificates(directory: str | Path) -> list[KeyCertificate]:
    """What a directory of keys holds, the authority first."""
    require("cryptography")
    from cryptography import x509

    root = Path(directory)
    revoked, found = _revoked(root), []
    for file in root.glob("*.pem"):
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
        der = ssl.PEM_cert_to_DER_cert(file.read_text(encoding="ascii"))
        digest = hashlib.sha256(der).hexdigest()
        worker = file.stem.removeprefix("worker-")
        found.append(
            KeyCertificate(
                name=file.stem,
                worker=int(worker) if worker.isdigit() else None,
                start=certificate.not_valid_before_utc,
                end=certificate.not_valid_after_utc,
                fingerprint=digest,
                revoked=digest in revoked,
            )
        )
    if not found:
        raise InputError(f"{str(root)!r} holds no keys: `matcha keys new {root} --workers 8`.")
    return sorted(found, key=lambda c: (-1 if c.worker is None else c.worker, c.name))


# -- parts -----------------------------------------------------------------------------------------


def _revoked(root: Path) -> frozenset[str]:
    file = root / "revoked.txt"
    return frozenset(file.read_text(encoding="utf-8").split()) if file.exists() else frozenset()


def _certify(root: Path, rank: int | None, days: float) -> None:
    """Write a new key and its certificate: the authority's own (None), or a worker's by it."""
    require("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key: Any = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(timezone.utc)
    name = _AUTHORITY if rank is None else f"worker-{rank}"
    title = "matcha authority" if rank is None else f"matcha worker {rank}"
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, title)])
    if rank is None:
        extension: Any = x509.BasicConstraints(ca=True, path_length=0)
        issuer, signer = subject, key
    else:
        uri = x509.UniformResourceIdentifier(f"{_IDENTITY}{rank}")
        extension = x509.SubjectAlternativeName([uri])
        authority = (root / f"{_AUTHORITY}.pem").read_bytes()
        issuer = x509.load_pem_x509_certificate(authority).subject
        secret = (root / f"{_AUTHORITY}.key").read_bytes()
        signer = serialization.load_pem_private_key(secret, password=None)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS + min(timedelta(0), timedelta(days=days)))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(extension, critical=rank is None)
        .sign(signer, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (root / f"{name}.pem").write_bytes(certificate.public_bytes(pem))
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (root / f"{name}.key").unlink(missing_ok=True)
    # Readable by its owner alone from its first byte on.
    handle = os.open(root / f"{name}.key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(secret)
