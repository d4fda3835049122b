"""The file in the data folder with the one-time password of the first user, until that is used or replaced."""

from pathlib import Path
from typing import Final

from redpoll.control.accounts.accounts import FIRST_USER, Accounts

__all__ = ["FIRST_LOGIN", "first_password"]

FIRST_LOGIN: Final = "first-login"


async def first_password(accounts: Accounts, data_dir: Path) -> str | None:
    """The password for the first login. If it no longer works, because a command replaced it or the login was at
    another node, the file is deleted. Raises SQLAlchemyError."""
    path = data_dir / FIRST_LOGIN
    try:
        password = path.read_text().strip()
    except FileNotFoundError:
        return None
    if not password or await accounts.is_one_time(FIRST_USER, password):
        # Empty: it is being written.
        return password or None
    path.unlink(missing_ok=True)
    return None
