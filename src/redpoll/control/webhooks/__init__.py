"""Webhooks: from a transition in Redis to the delivery to each endpoint (control/webhooks/README.md "Webhooks")."""
