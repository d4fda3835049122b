"""What this worker holds in Redis: channels, counts, members; and how dead workers are removed."""
