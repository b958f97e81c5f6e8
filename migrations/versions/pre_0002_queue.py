"""What the queue asks of the tables: one more way to end, and how much of a model an organisation is due."""

from __future__ import annotations

from alembic import op

revision = "pre_0002"
down_revision = "pre_0001"


def upgrade() -> None:
    op.execute("ALTER TABLE usage_events DROP CONSTRAINT usage_events_outcome_check")
    op.execute(
        "ALTER TABLE usage_events ADD CONSTRAINT usage_events_outcome_check CHECK (outcome IN "
        "('completed', 'length', 'cancelled', 'expired', 'failed', 'worker_lost', 'gateway_lost'))"
    )
    op.execute(
        "ALTER TABLE organisations ADD COLUMN weight real NOT NULL DEFAULT 1 CHECK (weight > 0 AND weight <= 1000)"
    )
