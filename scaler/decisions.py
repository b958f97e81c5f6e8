"""Rows of decisions: what the scaler decided, from which figures and why (table scale_decisions, append-only)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
import uuid6

from core.postgres import Connection, text
from scaler.policy import Decision, ModelSnapshot

_INSERT = text("""INSERT INTO scale_decisions (id, decided_at, model, inputs, current, desired, action, reason)
  VALUES (:id, :decided_at, :model, CAST(:inputs AS jsonb), :current, :desired, :action, :reason)""")


def record(
    connection: Connection, decisions: Sequence[Decision], inputs: dict[str, ModelSnapshot], now: datetime
) -> None:
    """Keep decisions with what they were made from."""
    rows = [_row(decision, inputs[decision.model], now) for decision in decisions]
    if rows:
        connection.execute(_INSERT, rows)


def _row(decision: Decision, inputs: ModelSnapshot, now: datetime) -> dict[str, Any]:
    return {
        "id": str(uuid6.uuid7()),
        "decided_at": now,
        "inputs": msgspec.json.encode(inputs).decode(),
        **msgspec.structs.asdict(decision),
    }
