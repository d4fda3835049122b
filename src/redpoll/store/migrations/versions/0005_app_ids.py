"""Ids of apps have up to 64 characters, because they may come from another server."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

_COLUMNS = (
    ("apps", "id"),
    ("keys", "app_id"),
    ("tokens", "app_id"),
    ("daily", "app_id"),
    ("webhooks", "app_id"),
    ("audit", "app_id"),
)


def upgrade() -> None:
    # SQLite doesn't check the length of a text, and changes a column's type only by copying its table.
    if op.get_bind().dialect.name == "sqlite":
        return
    for table, column in _COLUMNS:
        op.alter_column(table, column, type_=sa.String(64), existing_type=sa.String(18))
