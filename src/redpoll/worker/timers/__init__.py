"""What a worker does as time passes."""
