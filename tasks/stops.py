"""Tells the queues and the limiter what operators have stopped: what Postgres says, and nothing else.

The order makes it safe beside others who do the same: first a mark of the last change, then Postgres, then the change,
which is not made when another came after the mark. So a slow reader undoes nobody's stop, and repeats change nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from core.accounts import stops
from core.limits import stopped
from core.postgres import Engine, transaction
from core.redis import Call, Store
from tasks.queue import Queue, Stops

#: Organisations that are told of in one exchange.
PAGE = 500


def project(store: Store, engine: Engine, models: Iterable[str]) -> list[str]:
    """Tell the queues of these models once. Returns those to be told again: somebody else changed their stops
    meanwhile, or more of what is shed waits there than is ended at once.

    Raises:
      DatabaseAway, RedisError: some may have been told; call again.
    """
    queues = [Queue(model) for model in models]
    marks = store.run_all([queue.mark() for queue in queues])
    with transaction(engine) as connection:
        known = stops.in_force(connection)
    calls = [
        queue.halt(Stops(paused=stops.paused(known, queue.model), shed=stops.shed(known, queue.model)), mark)
        for queue, mark in zip(queues, marks, strict=True)
    ]
    told = zip(queues, store.run_all(calls), strict=True)
    return [queue.model for queue, halted in told if not halted.done or halted.left]


def project_accounts(limits: Store, engine: Engine) -> None:
    """Tell the limiter which organisations are suspended and which keys are revoked. Of an organisation that somebody
    changes meanwhile only keys are told.

    Raises:
      DatabaseAway, RedisError: some may have been told; call again.
    """
    with transaction(engine) as connection:
        known = stops.organisations(connection)
    marks = _run_all(limits, [stopped.seen(org_id) for org_id in known])
    flags = _flags(engine)
    _run_all(limits, [stopped.project(org_id, flags[org_id], mark) for org_id, mark in zip(known, marks, strict=True)])
    limits.run(stopped.remember())


def _flags(engine: Engine) -> dict[str, dict[str, str]]:
    """What is stopped, by organisation."""
    flags: dict[str, dict[str, str]] = defaultdict(dict)
    with transaction(engine) as connection:
        for org_id in stops.suspended(connection):
            flags[org_id][stopped.ORG] = stopped.SUSPENDED
        for org_id, key_id in stops.revoked(connection):
            flags[org_id][stopped.field_of(key_id)] = stopped.REVOKED
    return flags


def _run_all(store: Store, calls: Sequence[Call[Any]]) -> list[Any]:
    pages = (calls[start : start + PAGE] for start in range(0, len(calls), PAGE))
    return [reply for page in pages for reply in store.run_all(page)]
