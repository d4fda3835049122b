"""What is set: the settings, where they come from, and what they name."""
