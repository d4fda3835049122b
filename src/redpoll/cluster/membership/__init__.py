"""Keeps Redis informed of what this worker holds, and removes dead workers."""
