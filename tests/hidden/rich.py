"""Servers that tests start find this module instead of `rich`, which only the development extra installs.

structlog imports `rich` wherever it finds it, in each of a server's processes.
"""

raise ImportError("not installed for servers")
