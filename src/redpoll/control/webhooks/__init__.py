"""Webhooks: from a transition in Redis to the delivery to each endpoint (control/README.md "Webhooks")."""
