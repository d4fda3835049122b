"""The record store: what must survive restarts. Only the control plane writes it (store/README.md)."""
