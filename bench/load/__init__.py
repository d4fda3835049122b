"""Load on a whole server."""
