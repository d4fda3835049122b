"""The event trace and the event log."""
