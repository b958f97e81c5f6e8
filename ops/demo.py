"""What the first `forebay up` makes and later ones find again: secrets, a demo organisation with its keys, prices."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from core import postgres
from core.redis import Call, Store
from core.settings import Settings

if TYPE_CHECKING:
    from core.accounts.keys import Peppers

Kind = Literal["live", "admin"]

ORGANISATION = "demo"
#: What a million tokens of a model cost until somebody prices it (`forebay model price`).
INPUT_PER_MTOK, OUTPUT_PER_MTOK = Decimal("0.10"), Decimal("0.40")


def make_secrets(settings: Settings) -> None:
    """Pepper and salt, random, once: later lives must know the keys of earlier ones."""
    settings.secrets.mkdir(mode=0o700, parents=True, exist_ok=True)
    settings.secrets.chmod(0o700)
    for name in ("pepper", "salt"):
        if not (settings.secrets / name).exists():
            publish(settings.secrets / name, secrets.token_hex(32) + "\n")


def publish(path: Path, text: str) -> None:
    """Write a file that only we may read; nobody ever sees half of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    part.replace(path)


def key(settings: Settings, kind: Kind = "live") -> str:
    """A key of the demo organisation: made on the first run, shown again on every later one."""
    from core.accounts import keys

    kept = settings.secrets / ("demo_key" if kind == "live" else "demo_admin_key")
    engine = postgres.connect(settings.database_url)
    try:
        plain = kept.read_text().strip() if kept.exists() else ""
        if plain and keys.find(engine, keys.parse(plain).key_id):
            return plain
        plain, key_id = _make_key(engine, keys.pepper(settings), kind)
        record = keys.find(engine, key_id)
    finally:
        engine.dispose()
    if record is not None:
        _run(settings, keys.project(record))
    publish(kept, plain + "\n")
    return plain


def _make_key(engine: postgres.Engine, pepper: Peppers, kind: Kind) -> tuple[str, str]:
    from core.accounts import audit, keys, tenants
    from ops.connect import actor

    with postgres.transaction(engine) as connection:
        found = [each for each in tenants.organisations(connection) if each.name == ORGANISATION]
        organisation = found[0] if found else tenants.create_organisation(connection, ORGANISATION)
        told = {"actor": actor(), "org_id": organisation.id, "name": ORGANISATION}
        project = tenants.find_project(connection, org_id=organisation.id, wanted=tenants.FIRST_PROJECT)
        plain, row = keys.create_key(
            connection, org_id=organisation.id, project_id=project.id, name=ORGANISATION, pepper=pepper, kind=kind
        )
        if not found:
            audit.write(connection, action="org.create", subject=f"org:{organisation.id}", **told)
        audit.write(connection, action="key.create", subject=f"key:{row.id}", kind=kind, **told)
    return plain, row.id


def price(settings: Settings, models: Sequence[str]) -> None:
    """Price every model that has none, so that usage shows money from the first request on."""
    from billing import prices
    from core.accounts import audit
    from ops.connect import actor

    engine = postgres.connect(settings.database_url)
    try:
        with postgres.transaction(engine) as connection:
            now = datetime.now(UTC)
            priced = {row.model for row in prices.current(connection, now)}
            for model in (model for model in models if model not in priced):
                prices.set_price(
                    connection,
                    model,
                    input_per_mtok=INPUT_PER_MTOK,
                    output_per_mtok=OUTPUT_PER_MTOK,
                    effective_from=now,
                )
                audit.write(
                    connection,
                    actor=actor(),
                    action="price.set",
                    subject=f"model:{model}",
                    input_per_mtok=INPUT_PER_MTOK,
                    output_per_mtok=OUTPUT_PER_MTOK,
                )
            current = prices.current(connection, datetime.now(UTC))
    finally:
        engine.dispose()
    _run(settings, prices.project(current))


def _run(settings: Settings, call: Call[Any]) -> None:
    store = Store.connect(settings.redis_url)
    store.run(call)
    store.close()
