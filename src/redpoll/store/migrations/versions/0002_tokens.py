"""App tokens, and the daily counters of apps with a limited plan."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(12), primary_key=True),
        sa.Column("app_id", sa.String(18), sa.ForeignKey("apps.id", ondelete="CASCADE"), nullable=True, index=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("hash", sa.String(64), nullable=False, unique=True),
        sa.Column("prefix", sa.String(8), nullable=False),
        sa.Column("scopes", sa.Text, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("expires_at", sa.Float, nullable=True),
        sa.Column("last_used_at", sa.Float, nullable=True),
        sa.Column("revoked_at", sa.Float, nullable=True),
    )
    op.create_table(
        "daily",
        sa.Column("app_id", sa.String(18), sa.ForeignKey("apps.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("day", sa.String(8), primary_key=True),
        sa.Column("used", BIG, nullable=False),
    )
