"""Who may sign in to the dashboard."""
