"""What an operator sees: metrics, usage, health, debugging."""
