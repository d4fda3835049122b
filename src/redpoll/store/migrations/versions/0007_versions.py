"""Records that control planes keep in memory have the store's version at their last change."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    for table in ("apps", "tokens", "webhooks"):
        op.add_column(table, sa.Column("version", sa.BigInteger, nullable=False, server_default="0"))
        op.create_index(f"{table}_by_version", table, ["version"])
