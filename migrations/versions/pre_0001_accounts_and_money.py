"""Accounts, prices, usage and the scaler's decisions.

`pre_` migrations run before the new release's processes start and only expand; `post_` ones contract, a release
later. There are no downgrades: a release that must go back runs on the expanded schema.
Partitions of usage_events are made ahead by billing/events.py, never here: their names depend on today.
"""

from __future__ import annotations

from alembic import op

revision = "pre_0001"
down_revision = None

EVERYTHING = """
CREATE EXTENSION IF NOT EXISTS btree_gist;

CREATE FUNCTION uuid7_time(id uuid) RETURNS timestamptz LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS
$$ SELECT to_timestamp((('x' || substr(replace(id::text, '-', ''), 1, 12))::bit(48)::bigint) / 1000.0) $$;

CREATE FUNCTION forbid_change() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION '% is append-only', TG_TABLE_NAME USING ERRCODE = 'restrict_violation'; END $$;

CREATE TABLE organisations (
  id uuid PRIMARY KEY,
  name text NOT NULL CHECK (length(name) BETWEEN 1 AND 200),
  status text NOT NULL DEFAULT 'active' CHECK (status IN ('active', 'suspended', 'closed')),
  currency char(3) NOT NULL DEFAULT 'USD',
  created_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE projects (
  id uuid PRIMARY KEY,
  org_id uuid NOT NULL REFERENCES organisations,
  name text NOT NULL CHECK (length(name) BETWEEN 1 AND 200),
  archived_at timestamptz,
  created_at timestamptz NOT NULL DEFAULT now(),
  UNIQUE (org_id, name),
  UNIQUE (org_id, id)
);

CREATE TABLE api_keys (
  id text PRIMARY KEY CHECK (id ~ '^[0-9A-Za-z]{12}$'),
  org_id uuid NOT NULL,
  project_id uuid NOT NULL,
  name text NOT NULL CHECK (length(name) BETWEEN 1 AND 200),
  kind text NOT NULL CHECK (kind IN ('live', 'test', 'admin')),
  last4 char(4) NOT NULL,
  secret_hmac bytea NOT NULL UNIQUE CHECK (octet_length(secret_hmac) = 32),
  pepper_version smallint NOT NULL,
  requests_per_minute int CHECK (requests_per_minute >= 0),
  concurrent_requests int CHECK (concurrent_requests >= 0),
  created_at timestamptz NOT NULL DEFAULT now(),
  expires_at timestamptz,
  revoked_at timestamptz,
  revoked_reason text,
  FOREIGN KEY (org_id, project_id) REFERENCES projects (org_id, id)  -- a key cannot name another tenant's project
);
CREATE INDEX api_keys_org ON api_keys (org_id);

CREATE TABLE prices (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  model text NOT NULL,
  tier text NOT NULL CHECK (tier IN ('standard', 'priority', 'flex', 'batch')),
  currency char(3) NOT NULL CHECK (currency ~ '^[A-Z]{3}$'),
  effective tstzrange NOT NULL CHECK (NOT isempty(effective) AND lower(effective) IS NOT NULL),
  input_per_mtok numeric(20, 10) NOT NULL CHECK (input_per_mtok >= 0),
  cached_input_per_mtok numeric(20, 10) NOT NULL
    CHECK (cached_input_per_mtok >= 0 AND cached_input_per_mtok <= input_per_mtok),
  output_per_mtok numeric(20, 10) NOT NULL CHECK (output_per_mtok >= 0),
  created_at timestamptz NOT NULL DEFAULT now(),
  UNIQUE (id, model, tier),
  -- Not per currency: a request is admitted at one price, so a model and tier has one at a time.
  EXCLUDE USING gist (model WITH =, tier WITH =, effective WITH &&)
);

CREATE TABLE usage_events (
  event_id uuid NOT NULL,
  admitted_at timestamptz NOT NULL CHECK (admitted_at = uuid7_time(event_id)),  -- so a repeat meets the same partition
  entered_at timestamptz NOT NULL,
  ingested_at timestamptz NOT NULL DEFAULT now(),
  org_id uuid NOT NULL,
  project_id uuid NOT NULL,
  key_id text NOT NULL,
  model text NOT NULL,
  tier text NOT NULL,
  price_id bigint,  -- null: the model had no price at admission
  input_tokens bigint NOT NULL CHECK (input_tokens >= 0),
  cached_tokens bigint NOT NULL CHECK (cached_tokens >= 0 AND cached_tokens <= input_tokens),
  output_tokens bigint NOT NULL CHECK (output_tokens >= 0),
  reasoning_tokens bigint NOT NULL CHECK (reasoning_tokens >= 0 AND reasoning_tokens <= output_tokens),
  outcome text NOT NULL
    CHECK (outcome IN ('completed', 'length', 'cancelled', 'expired', 'failed', 'worker_lost')),
  attempt int NOT NULL CHECK (attempt >= 0),
  worker text NOT NULL,
  payload_sha256 bytea NOT NULL CHECK (octet_length(payload_sha256) = 32),
  PRIMARY KEY (event_id, admitted_at),
  FOREIGN KEY (price_id, model, tier) REFERENCES prices (id, model, tier),  -- no event at another model's price
  CHECK (entered_at >= admitted_at - interval '5 minutes')  -- an id from the future is not one of ours
) PARTITION BY RANGE (admitted_at);
CREATE INDEX usage_events_org ON usage_events (org_id, entered_at);
CREATE INDEX usage_events_entered ON usage_events (entered_at);
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON usage_events FOR EACH ROW EXECUTE FUNCTION forbid_change();
CREATE TRIGGER no_truncate BEFORE TRUNCATE ON usage_events FOR EACH STATEMENT EXECUTE FUNCTION forbid_change();

CREATE TABLE usage_conflicts (
  event_id uuid NOT NULL,
  seen_at timestamptz NOT NULL DEFAULT now(),
  kept_sha256 bytea NOT NULL,
  other_sha256 bytea NOT NULL,
  other jsonb NOT NULL,
  PRIMARY KEY (event_id, other_sha256)
);

CREATE TABLE usage_quarantine (
  model text NOT NULL,
  entry_id text NOT NULL,
  seen_at timestamptz NOT NULL DEFAULT now(),
  reason text NOT NULL,
  fields bytea NOT NULL,  -- the entry as it came: a msgpack map of bytes
  PRIMARY KEY (model, entry_id)
);

CREATE TABLE usage_hours (
  hour timestamptz PRIMARY KEY CHECK (date_trunc('hour', hour, 'UTC') = hour),
  state text NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'sealed')),
  marks bigint NOT NULL DEFAULT 0,
  rolled bigint NOT NULL DEFAULT 0 CHECK (rolled <= marks),
  rolled_up_at timestamptz
);
CREATE INDEX usage_hours_dirty ON usage_hours (hour) WHERE marks > rolled;

CREATE TABLE usage_hourly (
  hour timestamptz NOT NULL CHECK (date_trunc('hour', hour, 'UTC') = hour),
  org_id uuid NOT NULL,
  project_id uuid NOT NULL,
  key_id text NOT NULL,
  model text NOT NULL,
  tier text NOT NULL,
  price_id bigint NOT NULL,  -- 0: no price
  requests bigint NOT NULL,
  input_tokens bigint NOT NULL,
  cached_tokens bigint NOT NULL CHECK (cached_tokens <= input_tokens),
  output_tokens bigint NOT NULL,
  reasoning_tokens bigint NOT NULL CHECK (reasoning_tokens <= output_tokens),
  amount numeric(38, 18) NOT NULL,
  PRIMARY KEY (org_id, hour, project_id, key_id, model, tier, price_id)
);
CREATE INDEX usage_hourly_hour ON usage_hourly (hour);

CREATE TABLE scale_decisions (
  id uuid PRIMARY KEY,
  decided_at timestamptz NOT NULL,
  model text NOT NULL,
  inputs jsonb NOT NULL,
  current int NOT NULL CHECK (current >= 0),
  desired int NOT NULL CHECK (desired >= 0),
  action text NOT NULL,
  reason text NOT NULL
);
CREATE INDEX scale_decisions_model ON scale_decisions (model, decided_at);
"""


def upgrade() -> None:
    op.execute(EVERYTHING)
