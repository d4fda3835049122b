"""What one part costs."""
