"""Logs: one JSON object a line on standard error, with a sentence for people and a stable `event` name for machines.

Prompts, outputs and secrets are never logged; a key that a caller put where names are logged is cut short.
`bound(request_id=…)` binds an id to everything inside it, `bind` to all the rest of an asyncio task or thread.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import orjson
import structlog
from structlog.contextvars import bind_contextvars as bind
from structlog.contextvars import bound_contextvars as bound

from core.errors import without_secrets

__all__ = ["bind", "bound", "get", "set_up"]


def set_up(process: str, level: str = "INFO") -> None:
    """Configure structlog, and send the standard library's records the same way."""

    def name_process(_: Any, __: str, record: dict[str, Any]) -> dict[str, Any]:
        return {"process": process, **record}  # not a context variable: those do not reach other threads

    shared: list[Any] = [
        name_process,
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        cache_logger_on_first_use=True,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.JSONRenderer(serializer=_json),
        ],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


def _json(record: dict[str, Any], **_: Any) -> str:
    return without_secrets(orjson.dumps(record, default=repr).decode())


def get(name: str) -> Any:
    """A logger. Use: `log.info("request_finished", request_id=…)`."""
    return structlog.get_logger(name)
