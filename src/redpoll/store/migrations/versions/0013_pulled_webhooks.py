"""Webhooks without a URL, whose deliveries are pulled, and webhooks for some client events only."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.add_column("webhooks", sa.Column("client_events", sa.Text, nullable=False, server_default="[]"))
