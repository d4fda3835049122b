"""Users who log in at an OpenID Connect provider, and what the provider said of them."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column("users", sa.Column("subject", sa.Text, nullable=True))
    op.add_column("users", sa.Column("apps", sa.Text, nullable=True))
    op.add_column("sessions", sa.Column("id_token", sa.Text, nullable=True))
    op.create_index("ix_users_subject", "users", ["subject"], unique=True)
