"""Servers beside each other, and the tables of figures."""
