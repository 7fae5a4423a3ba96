"""Sponsor: a member speaks for workers that want to join, until they are in the plan."""

from __future__ import annotations

import hmac
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from matcha.distributed.links.joining import Talk, come_again, connect_seconds, parse_address
from matcha.distributed.links.link_state import MAX_NEW
from matcha.distributed.links.listener import JoinRequest, RefusedError
from matcha.distributed.links.transport import LinkTransport, Phase
from matcha.distributed.worker_state import WorkerState
from matcha.plans import Plan, PlanLike, StagedPlan

_log = logging.getLogger("matcha.links")
_MOST_ASKED = 1 << 16  # bytes of what a worker says that wants to join
_ALIVE = 1.0  # seconds between signs of life
_MOST_AT_ONCE = 16  # workers for which one member speaks at a time
_MOST_LINKS = 128
_MOST_REQUEST = 1000  # characters


def last_level(plan: PlanLike) -> Plan:
    """The plan of the last stage, which says who is in the team."""
    return plan.levels[plan.stages[-1].level] if isinstance(plan, StagedPlan) else plan


@dataclass(eq=False)
class Sponsor:
    """One member's side of the talk in `matcha.distributed.links.joining`."""

    state: WorkerState
    transport: LinkTransport
    facts: Mapping[str, str]
    """What must be the same on every worker."""
    refusal: str
    """Why this team cannot change; empty if it can."""
    token: str
    """What workers show that join without keys."""
    taken: dict[str, int] = field(default_factory=dict)
    """Requests that are in the plan, by name, and their workers."""
    refused: dict[str, str] = field(default_factory=dict)
    """Those that never will be, and why; `-3` is that of worker 3 to leave."""
    is_open: bool = True
    """Whether this worker still hears what becomes of requests."""

    def __post_init__(self) -> None:
        self._slots: dict[str, int] = {}  # places of the requests for which this worker speaks
        self._busy = threading.Semaphore(_MOST_AT_ONCE)

    def __call__(self, request: JoinRequest) -> Callable[[socket.socket, str], None]:
        """For the listener: check a request, and return what goes on with it."""
        if not self.transport.has_keys:
            if not self.token:
                raise RefusedError("this team takes in no others: it has neither keys nor a token")
            if not hmac.compare_digest(request.token.encode(), self.token.encode()):
                raise RefusedError("it does not show this team's token")
        if self.transport.phase is not Phase.RUNNING or not self._busy.acquire(blocking=False):
            return come_again

        def take_over(connection: socket.socket, where: str) -> None:
            arguments = connection, where, request
            name = "matcha-sponsor"
            threading.Thread(target=self._talk, args=arguments, name=name, daemon=True).start()

        return take_over

    def _talk(self, connection: socket.socket, where: str, request: JoinRequest) -> None:
        talk, name, rank = Talk(connection, _MOST_ASKED), os.urandom(6).hex(), self.transport.rank
        try:
            talk.say(self._greeting())
            worker, entry = self._check(talk.hear(), request)
            if entry is not None:
                self._publish(name, entry)
                _log.info("worker %d: a worker from %s wants to join", rank, where)
            said = 0.0
            while self.is_open and self.transport.phase is Phase.RUNNING:
                found = self._find(name, worker)
                if found is not None:
                    talk.say(found)
                    break
                if time.monotonic() > said + _ALIVE:
                    talk.say({"wait": True})
                    said = time.monotonic()
                if talk.is_gone(0.02):
                    _log.info("worker %d: who wanted to join from %s is gone", rank, where)
                    break
        except RefusedError as refusal:
            _log.warning("refused a worker from %s that wants to join: %s", where, refusal)
            with suppress(OSError):
                talk.say({"refused": str(refusal)})
        except OSError as error:
            _log.info("worker %d: who wanted to join from %s is gone: %s", rank, where, error)
        except Exception:
            _log.exception("a worker from %s that wants to join caused an error", where)
        finally:
            self._publish(name, None)
            talk.close()
            self._busy.release()

    def _greeting(self) -> dict[str, Any]:
        if self.refusal:
            raise RefusedError(f"this team takes in no others, as {self.refusal}")
        transport = self.transport
        with transport.lock:
            there = last_level(self.state.plan).members
            links = sum({*link} <= {*there} for link in transport.team.topology.links)
            return {
                "given": self.state.replanning.given.to_json(),
                "facts": self.facts,
                "peers": transport.team.peers.addresses,
                "members": transport.members,
                "there": there,
                "timeout": transport.patience,
                "degree": max(2, round(2 * links / max(1, len(there)))),  # as others usually have
            }

    def _check(
        self, offer: dict[str, Any], request: JoinRequest
    ) -> tuple[int, dict[str, Any] | None]:
        """The worker's number, or -1, and what is published; None where it is in the plan."""
        there, rank = {*last_level(self.state.plan).members}, request.join
        links, listen = offer.get("links"), offer.get("listen")
        if not isinstance(links, list) or not all(type(peer) is int for peer in links):
            raise RefusedError("it names no links")
        if rank >= len(self.transport.team.peers.addresses) + MAX_NEW:
            raise RefusedError(f"{rank} is far above all other workers' numbers")
        if rank in self.transport.members:
            raise RefusedError(f"worker {rank} is there already")
        if rank in there:  # it was lost, or a newcomer that died on the way: it comes back
            return rank, None
        if not 0 < len(links) <= _MOST_LINKS or not {*links} <= there:
            raise RefusedError("it needs links to workers that are there")
        address = None
        if listen is not None:
            try:
                host, port = listen
                address = parse_address(f"{host}:{port}" if ":" not in host else f"[{host}]:{port}")
            except (ValueError, TypeError):
                raise RefusedError("it listens nowhere that makes sense") from None
            if connect_seconds(address) is None:  # behind NAT, say: then it dials the others
                address = None
        return rank, {"rank": rank, "links": sorted({*links}), "address": address}

    def _publish(self, name: str, entry: Mapping[str, Any] | None) -> None:
        """Tell all workers of a request, by its name; None takes it back."""
        with self.transport.lock:
            if entry is None:
                if name in self._slots:
                    self.transport.set_note(f"join/{self._slots.pop(name)}", "")
                return
            note = json.dumps([name, entry])
            if len(note) > _MOST_REQUEST:
                raise RefusedError("it has too many links")
            self._slots[name] = min({*range(len(self._slots) + 1)} - {*self._slots.values()})
            self.transport.set_note(f"join/{self._slots[name]}", note)

    def _find(self, name: str, worker: int) -> dict[str, Any] | None:
        """What has become of a request; None: nothing yet."""
        with self.transport.lock:
            if worker not in last_level(self.state.plan).members or name in self._slots:
                if name in self.refused:
                    raise RefusedError(self.refused[name])
                if name not in self.taken:
                    return None
                worker = self.taken[name]
            team = self.transport.team
            plan = self.state.plan.to_json()
            return {"rank": worker, "plan": plan, "network": team.network, **team.to_json()}
