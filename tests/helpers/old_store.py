"""A record store as a release before migration 0009 left it. Not a test."""

# Takes a store of this release back, on both databases.
STATEMENTS = (
    "DELETE FROM meta WHERE name = 'shard_key'",
    "UPDATE meta SET value = '0007' WHERE name = 'compatible'",
    # What was added since.
    "DROP TABLE revoked_grants",
    "DROP INDEX ix_users_subject",
    "ALTER TABLE users DROP COLUMN subject",
    "ALTER TABLE users DROP COLUMN apps",
    "ALTER TABLE sessions DROP COLUMN id_token",
    "ALTER TABLE apps DROP COLUMN deleted_at",
    "ALTER TABLE webhooks DROP COLUMN client_events",
    "ALTER TABLE webhooks DROP COLUMN batch",
    "UPDATE alembic_version SET version_num = '0008'",
)
