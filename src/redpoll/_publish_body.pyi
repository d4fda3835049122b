"""Shapes of ext/redpoll/_publish_body.pyx: it has functions for compiled modules only."""
