"""Apps, keys, webhooks and tokens, and their way to Redis."""
