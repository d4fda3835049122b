"""Webhooks that send the events of a second in one request."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.add_column("webhooks", sa.Column("batch", sa.Boolean, nullable=False, server_default=sa.false()))
