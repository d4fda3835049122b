"""Webhook endpoints, deliveries to them, and the attempts at each."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(12), primary_key=True),
        sa.Column("app_id", sa.String(18), sa.ForeignKey("apps.id", ondelete="CASCADE"), nullable=False, index=True),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("secret", sa.String(64), nullable=False),
        sa.Column("previous_secret", sa.String(64), nullable=False),
        sa.Column("previous_until", sa.Float, nullable=False),
        sa.Column("events", sa.Text, nullable=False),
        sa.Column("channels", sa.Text, nullable=False),
        sa.Column("format", sa.String(8), nullable=False),
        sa.Column("pin", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("disabled_at", sa.Float, nullable=True),
        sa.Column("failing_since", sa.Float, nullable=True),
        sa.Column("deleted_at", sa.Float, nullable=True),
    )
    op.create_table(
        "deliveries",
        sa.Column("number", BIG, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(36), nullable=False, unique=True),
        sa.Column("endpoint_id", sa.String(12), sa.ForeignKey("webhooks.id", ondelete="CASCADE"), nullable=False),
        sa.Column("event", sa.String(24), nullable=False),
        sa.Column("channel", sa.Text, nullable=False),
        sa.Column("user", sa.Text, nullable=True),
        sa.Column("stamp", sa.BigInteger, nullable=False),
        sa.Column("time_ms", sa.BigInteger, nullable=False),
        sa.Column("trace", sa.Text, nullable=True),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("state", sa.String(9), nullable=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("cycle_from", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    op.create_index("deliveries_by_state", "deliveries", ["endpoint_id", "state", "at"])
    op.create_table(
        "attempts",
        sa.Column("delivery", BIG, sa.ForeignKey("deliveries.number", ondelete="CASCADE"), primary_key=True),
        sa.Column("n", sa.Integer, primary_key=True),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("status", sa.Integer, nullable=True),
        sa.Column("duration_ms", sa.Integer, nullable=False),
        sa.Column("outcome", sa.String(12), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("response", sa.LargeBinary, nullable=False),
        sqlite_with_rowid=False,
    )
