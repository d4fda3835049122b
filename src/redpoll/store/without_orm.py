"""Keeps SQLAlchemy's ORM out of a process that uses only its Core.

`sqlalchemy.ext.asyncio` imports the ORM for its sessions. That takes a tenth of the processor time in which control
starts, and 6 MB.
"""

import sys
from types import ModuleType

__all__ = ["leave_out_orm"]

# The modules that import the ORM. What they define is None then.
_OF_SESSIONS = ("sqlalchemy.ext.asyncio.scoping", "sqlalchemy.ext.asyncio.session")


def leave_out_orm() -> None:
    """Call it before the first import of SQLAlchemy. Afterwards it does nothing."""
    if "sqlalchemy.ext.asyncio" in sys.modules:
        return
    for name in _OF_SESSIONS:
        stand_in = ModuleType(name)
        stand_in.__dict__["__getattr__"] = _nothing
        sys.modules[name] = stand_in


def _nothing(name: str) -> None:
    if name.startswith("__"):
        raise AttributeError(name)
