"""The last versions of the store have random ids, by which control planes notice that changes were lost."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.create_table(
        "changes",
        sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("id", sa.String(16), nullable=False),
    )
