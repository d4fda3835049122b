"""What the command line asks of the control plane."""
