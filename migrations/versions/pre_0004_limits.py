"""Limits at every scope, secrets apart from the keys that they open, money that binds, stops, and the audit log.

A key's id is what limits and spend belong to; its secrets come and go (key_secrets). The columns of api_keys that moved
stay for processes of the release before, which may run beside this one or after it: they are written and never read.
"""

from __future__ import annotations

from alembic import op

revision = "pre_0004"
down_revision = "pre_0003"

EVERYTHING = """
ALTER TABLE organisations
  ADD COLUMN plan text NOT NULL DEFAULT 'postpaid' CHECK (plan IN ('postpaid', 'prepaid', 'free')),
  ADD COLUMN stopped_reason text,
  ADD COLUMN stopped_at timestamptz;

ALTER TABLE api_keys
  ADD COLUMN scopes text[] NOT NULL DEFAULT '{generate,models.read,usage.read}',
  ADD COLUMN models text[] NOT NULL DEFAULT '{}',    -- none: all
  ADD COLUMN networks cidr[] NOT NULL DEFAULT '{}',  -- none: anywhere
  ADD COLUMN last_used_at timestamptz,
  ADD COLUMN last_used_from inet,
  ALTER COLUMN secret_hmac DROP NOT NULL,
  ALTER COLUMN pepper_version DROP NOT NULL,
  ADD UNIQUE (org_id, id);
UPDATE api_keys SET scopes = '{admin}' WHERE kind = 'admin';
ALTER TABLE api_keys
  ADD CONSTRAINT api_keys_scopes_check CHECK (
    cardinality(scopes) > 0 AND CASE kind
      WHEN 'admin' THEN scopes = '{admin}'  -- who administers cannot generate, and the other way round
      ELSE scopes <@ '{generate,models.read,usage.read}'::text[] END);

CREATE TABLE key_secrets (
  secret_hmac bytea PRIMARY KEY CHECK (octet_length(secret_hmac) = 32),
  key_id text NOT NULL REFERENCES api_keys,
  pepper_version smallint NOT NULL CHECK (pepper_version > 0),
  last4 char(4) NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now(),
  expires_at timestamptz  -- set when a rotation puts another in its place
);
CREATE INDEX key_secrets_key ON key_secrets (key_id);
CREATE UNIQUE INDEX key_secrets_newest ON key_secrets (key_id) WHERE expires_at IS NULL;
INSERT INTO key_secrets (secret_hmac, key_id, pepper_version, last4, created_at)
  SELECT secret_hmac, id, pepper_version, last4, created_at FROM api_keys;
-- Of every new key; and its limits, where the release before makes it, which knows no other place for them.
CREATE FUNCTION keep_secret() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  INSERT INTO key_secrets (secret_hmac, key_id, pepper_version, last4, created_at)
    VALUES (NEW.secret_hmac, NEW.id, NEW.pepper_version, NEW.last4, NEW.created_at);
  IF NEW.requests_per_minute IS NOT NULL OR NEW.concurrent_requests IS NOT NULL THEN
    INSERT INTO limits (org_id, scope, requests_per_minute, concurrent_requests)
      VALUES (NEW.org_id, 'key:' || NEW.id, NEW.requests_per_minute, NEW.concurrent_requests);
  END IF;
  RETURN NULL; END $$;
CREATE TRIGGER keep_secret AFTER INSERT ON api_keys FOR EACH ROW
  WHEN (NEW.secret_hmac IS NOT NULL) EXECUTE FUNCTION keep_secret();
-- The release before knows no scopes, and the default is not for its admin keys.
CREATE FUNCTION administer() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  NEW.scopes := '{admin}'; RETURN NEW; END $$;
CREATE TRIGGER administer BEFORE INSERT ON api_keys FOR EACH ROW
  WHEN (NEW.kind = 'admin' AND NEW.scopes = '{generate,models.read,usage.read}') EXECUTE FUNCTION administer();

CREATE TABLE limits (
  org_id uuid NOT NULL REFERENCES organisations,
  scope text NOT NULL CHECK (scope = 'org' OR scope ~ '^key:[0-9A-Za-z]{12}$'
    OR scope ~ '^project:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
    OR scope ~ '^model:[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$'),
  requests_per_minute int CHECK (requests_per_minute >= 0),  -- null, here and below: no limit
  tokens_per_minute bigint CHECK (tokens_per_minute >= 0),
  input_tokens_per_minute bigint CHECK (input_tokens_per_minute >= 0),
  output_tokens_per_minute bigint CHECK (output_tokens_per_minute >= 0),
  concurrent_requests int CHECK (concurrent_requests >= 0),
  connections int CHECK (connections >= 0),
  money_per_day numeric(20, 10) CHECK (money_per_day >= 0),
  money_per_month numeric(20, 10) CHECK (money_per_month >= 0),
  changed_at timestamptz NOT NULL DEFAULT now(),
  -- A limit cannot name another tenant's key or project.
  key_id text GENERATED ALWAYS AS (CASE WHEN scope LIKE 'key:%' THEN substr(scope, 5) END) STORED,
  project_id uuid GENERATED ALWAYS AS (
    CASE WHEN scope ~ '^project:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' THEN substr(scope, 9)::uuid END) STORED,
  PRIMARY KEY (org_id, scope),
  FOREIGN KEY (org_id, key_id) REFERENCES api_keys (org_id, id),
  FOREIGN KEY (org_id, project_id) REFERENCES projects (org_id, id)
);
CREATE INDEX limits_wide ON limits (org_id) WHERE key_id IS NULL AND project_id IS NULL;
INSERT INTO limits (org_id, scope, requests_per_minute, concurrent_requests)
  SELECT org_id, 'key:' || id, requests_per_minute, concurrent_requests FROM api_keys
  WHERE requests_per_minute IS NOT NULL OR concurrent_requests IS NOT NULL;

CREATE TABLE credit_grants (
  id uuid PRIMARY KEY,
  org_id uuid NOT NULL REFERENCES organisations,
  amount numeric(20, 10) NOT NULL CHECK (amount > 0),
  currency char(3) NOT NULL CHECK (currency ~ '^[A-Z]{3}$'),
  reason text NOT NULL,
  expires_at timestamptz,
  created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX credit_grants_org ON credit_grants (org_id);
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON credit_grants FOR EACH ROW EXECUTE FUNCTION forbid_change();
CREATE TRIGGER no_truncate BEFORE TRUNCATE ON credit_grants FOR EACH STATEMENT EXECUTE FUNCTION forbid_change();

CREATE TABLE credit_entries (
  id uuid PRIMARY KEY,
  org_id uuid NOT NULL REFERENCES organisations,
  amount numeric(20, 10) NOT NULL CHECK (amount <> 0),
  reason text NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX credit_entries_org ON credit_entries (org_id);
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON credit_entries FOR EACH ROW EXECUTE FUNCTION forbid_change();
CREATE TRIGGER no_truncate BEFORE TRUNCATE ON credit_entries FOR EACH STATEMENT EXECUTE FUNCTION forbid_change();

CREATE TABLE money_marks (
  org_id uuid PRIMARY KEY,  -- references nothing, as usage_events: usage is never refused for what it names
  ingested bigint NOT NULL DEFAULT 0 CHECK (ingested >= 0)
);

ALTER TABLE usage_events ADD COLUMN ingest bigint;  -- which of its organisation's ingests wrote it (money_marks)

CREATE TABLE stops (
  kind text NOT NULL CHECK (kind IN ('model', 'class')),
  name text NOT NULL CHECK (name <> ''),
  model text NOT NULL DEFAULT '' CHECK (kind = 'class' OR model = ''),  -- of a class: only this model's; '': all
  reason text NOT NULL DEFAULT '',
  since timestamptz NOT NULL DEFAULT now(),
  by_whom text NOT NULL,
  PRIMARY KEY (kind, name, model)
);

CREATE TABLE audit_log (
  n bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  at timestamptz NOT NULL,
  actor text NOT NULL,
  action text NOT NULL,
  subject text NOT NULL,
  org_id uuid,
  detail jsonb NOT NULL,
  prev_hash bytea NOT NULL UNIQUE CHECK (octet_length(prev_hash) = 32),  -- one row follows each: no fork
  hash bytea NOT NULL UNIQUE CHECK (octet_length(hash) = 32)
);
CREATE INDEX audit_log_org ON audit_log (org_id, n);
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON audit_log FOR EACH ROW EXECUTE FUNCTION forbid_change();
CREATE TRIGGER no_truncate BEFORE TRUNCATE ON audit_log FOR EACH STATEMENT EXECUTE FUNCTION forbid_change();

-- NOT VALID: what is there kept to a narrower check, and to look at it again would hold up every writer for a scan of
-- all partitions. New rows are checked all the same.
ALTER TABLE usage_events DROP CONSTRAINT usage_events_outcome_check;
ALTER TABLE usage_events ADD CONSTRAINT usage_events_outcome_check CHECK (outcome IN
  ('completed', 'length', 'cancelled', 'expired', 'stopped', 'shed', 'refused', 'failed', 'worker_lost',
   'gateway_lost')) NOT VALID;
"""


def upgrade() -> None:
    op.execute(EVERYTHING)
