"""Stored responses, and how long an organisation's are kept; and one more way to end."""

from __future__ import annotations

from alembic import op

revision = "pre_0003"
down_revision = "pre_0002"

EVERYTHING = """
ALTER TABLE organisations ADD COLUMN retention_days int NOT NULL DEFAULT 30 CHECK (retention_days BETWEEN 0 AND 3650);

CREATE TABLE responses (
  id uuid PRIMARY KEY,
  org_id uuid NOT NULL,
  project_id uuid NOT NULL,
  key_id text NOT NULL,
  model text NOT NULL,
  status text NOT NULL CHECK (status IN
    ('queued', 'in_progress', 'completed', 'incomplete', 'cancelled', 'failed', 'deleted')),
  previous_id uuid,
  streamed boolean NOT NULL,
  background boolean NOT NULL,
  items json,     -- json, not jsonb: what was given comes back as it was, and may hold what jsonb refuses ("\\u0000")
  response json,
  body bytea,
  created_at timestamptz NOT NULL DEFAULT now(),
  expires_at timestamptz NOT NULL,
  looked_at timestamptz NOT NULL DEFAULT now(),
  CHECK (status = 'deleted' OR (items IS NOT NULL AND response IS NOT NULL)),
  CHECK (status <> 'deleted' OR (items IS NULL AND response IS NULL AND body IS NULL)),
  CHECK (body IS NULL OR status IN ('queued', 'in_progress'))
);
CREATE INDEX responses_expired ON responses (expires_at);
ALTER TABLE usage_events DROP CONSTRAINT usage_events_outcome_check;
ALTER TABLE usage_events ADD CONSTRAINT usage_events_outcome_check CHECK (outcome IN
  ('completed', 'length', 'cancelled', 'expired', 'refused', 'failed', 'worker_lost', 'gateway_lost'));
CREATE INDEX responses_backlog ON responses (looked_at) WHERE status IN ('queued', 'in_progress');
"""


def upgrade() -> None:
    op.execute(EVERYTHING)
