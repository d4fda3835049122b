"""The version of redpoll-client."""

__version__ = "0.1.0"
