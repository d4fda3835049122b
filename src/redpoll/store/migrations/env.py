"""Alembic's entry point. It runs the migrations on the connection that store.py passes in; there is no alembic.ini."""

from alembic import context

from redpoll.store.schema import metadata

# render_as_batch: SQLite changes a table by copying it.
context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
