"""Apps, their keys, and the version of the directory made of them."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "meta",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
    )
    op.create_table(
        "apps",
        sa.Column("id", sa.String(18), primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("settings", sa.Text, nullable=False),
    )
    op.create_table(
        "keys",
        sa.Column("number", BIG, primary_key=True, autoincrement=True),
        sa.Column("key", sa.String(128), nullable=False, unique=True),
        sa.Column("secret", sa.String(128), nullable=False),
        sa.Column("app_id", sa.String(18), sa.ForeignKey("apps.id", ondelete="CASCADE"), nullable=False, index=True),
        sa.Column("enabled", sa.Boolean, nullable=False),
        sa.Column("given", sa.Boolean, nullable=False),
    )
