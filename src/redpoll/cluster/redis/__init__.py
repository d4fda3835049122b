"""The way to Redis: connections, scripts and the names of keys."""
