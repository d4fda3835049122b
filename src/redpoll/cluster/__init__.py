"""What the processes share in Redis: keys, scripts, topics, and the order of operations. See README.md."""
