"""Sockets: one uvloop loop, one thread, and nothing that must survive the process."""
