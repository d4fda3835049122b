"""What alembic runs: the migrations, on the connection that the store passes in. There is no alembic.ini."""

from alembic import context

from redpoll.store.schema import metadata

# SQLite changes a table by copying it: render_as_batch.
context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
