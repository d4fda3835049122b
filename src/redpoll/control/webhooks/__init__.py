"""Webhooks: which transitions are told to whom, and every attempt at telling them."""
