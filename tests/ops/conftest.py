"""Commands over stores that a `forebay up` left word of, and what they print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from core.postgres import migrate
from core.redis import Store

PEPPER = "a pepper for tests only"


@pytest.fixture
def environ(tmp_path: Path, empty_database: str, valkey_url: str, store: Store) -> dict[str, str | None]:
    """Nothing says where the stores are but the `ready.json` of a running `forebay up`."""
    migrate(empty_database)
    ready = {"url": "http://127.0.0.1:1", "redis_url": valkey_url, "database_url": empty_database, "pids": {}}
    (tmp_path / "ready.json").write_text(json.dumps(ready))
    return {"FOREBAY_DATA": str(tmp_path), "FOREBAY_PEPPER": PEPPER, "DATABASE_URL": None, "REDIS_URL": None}


def forebay(environ: dict[str, str | None], noun: click.Command, *words: str) -> Result:
    return CliRunner().invoke(noun, words, env=environ)


def data(environ: dict[str, str | None], noun: click.Command, *words: str) -> Any:
    """What a command prints as JSON when it ends well."""
    done = forebay(environ, noun, *words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)
