"""The HTTP connection."""
