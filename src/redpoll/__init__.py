"""redpoll: a self-hosted real-time messaging server that speaks the Pusher Channels protocol."""

__version__ = "0.1.0"
