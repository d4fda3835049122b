"""The random id by which servers that share a Redis find out whether they share a record store."""

import secrets

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    meta = sa.table("meta", sa.column("name", sa.String), sa.column("value", sa.Text))
    op.execute(meta.insert().values(name="store_id", value=secrets.token_hex(8)))
