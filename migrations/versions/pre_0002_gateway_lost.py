"""A request may end because its gateway died: one more outcome."""

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
