"""What redpoll prints: log lines, JSON and text for terminals."""
