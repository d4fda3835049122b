"""Clients that read a channel over HTTP. See README.md."""
