"""Agreement: before the first exchange, all workers check that they run the same thing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence

from matcha.distributed.collectives import gather
from matcha.distributed.transports.base import Transport
from matcha.errors import InputError

__all__ = ["agree", "differences"]


def agree(transport: Transport, facts: Mapping[str, str], timeout: float) -> None:
    """Compare facts with all workers and learn their host names. A collective call.

    Args:
        transport: its `hosts` are filled in.
        facts: what must be the same everywhere, by the words a person would use for it.
        timeout: seconds to wait for any one worker.

    Raises:
        InputError: on every worker, naming which rank differs in what.
    """
    me = {"rank": transport.rank, "host": transport.host(), "facts": dict(facts)}
    answers = [json.loads(answer) for answer in gather(transport, json.dumps(me).encode(), timeout)]
    hosts = {answer["rank"]: answer["host"] for answer in answers}  # some may be missing already
    transport.hosts = tuple(hosts.get(r, "unknown") for r in range(transport.num_workers))
    found = differences([answer["facts"] for answer in answers])
    if found:
        ranks = [answer["rank"] for answer in answers]
        listed = "; ".join(f"{transport.name(ranks[place])} has {what}" for place, what in found)
        raise InputError(f"the workers do not agree: {listed}.")


def differences(facts: Sequence[Mapping[str, str]]) -> list[tuple[int, str]]:
    """Who differs from the majority, in what; in a tie the lowest rank's side is the majority.

    >>> differences([{"plan": "a"}, {"plan": "a"}, {"plan": "b"}])
    [(2, "another plan ('b', others 'a')")]
    """
    found = []
    for name in {name: None for worker in facts for name in worker}:
        values = [worker.get(name, "nothing") for worker in facts]
        usual, _ = Counter(values).most_common(1)[0]
        found += [
            (rank, f"another {name} ({value!r}, others {usual!r})")
            for rank, value in enumerate(values)
            if value != usual
        ]
    return sorted(found)
