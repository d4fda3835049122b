"""How the processes of a node talk."""
