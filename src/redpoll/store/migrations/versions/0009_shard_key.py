"""New stores have a key that says in which shard of Redis a channel is; this one has none, so its histories stay where
they are."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    meta = sa.table("meta", sa.column("name", sa.String), sa.column("value", sa.Text))
    op.execute(meta.insert().values(name="shard_key", value=""))
