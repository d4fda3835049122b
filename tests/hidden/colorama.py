"""Servers that tests start find this module instead of `colorama`, which only the development extra installs.

structlog imports `colorama` wherever it finds it, in each of a server's processes.
"""

raise ImportError("not installed for servers")
