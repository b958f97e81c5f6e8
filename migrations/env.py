"""Run by alembic inside `core.postgres.migrate`, which holds the lock and hands in the engine."""

from __future__ import annotations

from alembic import context


def run() -> None:
    """Each migration in a transaction of its own, so that a failed one leaves the schema of the one before."""
    with context.config.attributes["engine"].connect() as connection:
        context.configure(connection=connection, transaction_per_migration=True)
        with context.begin_transaction():
            context.run_migrations()


run()
