"""The nodes of the cluster, and which of them leads."""
