"""`redpoll doctor`: says why a server can't be reached, or why this machine won't carry it, and what to change."""
