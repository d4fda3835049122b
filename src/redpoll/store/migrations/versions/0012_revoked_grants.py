"""Revoked channel grants."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.create_table(
        "revoked_grants",
        sa.Column(
            "app_id", sa.String(64), sa.ForeignKey("apps.id", ondelete="CASCADE"), primary_key=True, nullable=False
        ),
        sa.Column("subject", sa.Text, primary_key=True, nullable=False),
        sa.Column("at", sa.BigInteger, nullable=False),
    )
