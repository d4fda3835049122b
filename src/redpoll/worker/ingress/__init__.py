"""From an accepted TCP connection to a WebSocket or an HTTP request."""
