"""The control plane: the HTTP API, records, metrics, and what must be done once in a cluster."""
