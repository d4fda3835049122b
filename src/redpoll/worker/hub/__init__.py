"""Connections, channels and users of one worker."""
