"""Apps can be deleted. Their rows stay for a while, so that all control planes learn of it."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.add_column("apps", sa.Column("deleted_at", sa.Float, nullable=True))
