"""Messages that a client missed: replay on subscribe, history requests, recovery."""
