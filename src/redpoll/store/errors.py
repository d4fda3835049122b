"""The errors of the stores, and their reasons as text that may be logged and shown: without statements, which may
contain secrets."""

import sqlalchemy as sa

__all__ = ["StoreError", "StoreUnavailable", "reason_of"]


class StoreError(Exception):
    """The store can't be opened. The text is a sentence for the operator."""


class StoreUnavailable(sa.exc.SQLAlchemyError):
    """The database can't be used at present: it is away, restarting, full or locked. The text is a sentence for people.

    A change that ends with it may have been committed, if the connection was lost during the commit. `misconfigured`:
    the database refused the connection (wrong password, no such database), so waiting doesn't help. `locked`: another
    change didn't end in time.
    """

    def __init__(self, text: str, *, misconfigured: bool = False, locked: bool = False) -> None:
        super().__init__(text)
        self.misconfigured = misconfigured
        self.locked = locked


def reason_of(error: Exception) -> str:
    """The database's own message (`database is locked`), without the statement, which may contain secrets."""
    return str(getattr(error, "orig", None) or error)
