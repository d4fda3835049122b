"""What an app's id, key and secret may look like, as a check and as a phrase for error messages."""

import re

__all__ = [
    "APP_ID_RULE",
    "APP_KEY_RULE",
    "APP_SECRET_RULE",
    "MAX_APP_ID_CHARS",
    "valid_app_id",
    "valid_app_key",
    "valid_app_secret",
]

# An app's id and key are parts of paths, the id also of Redis keys, whose parts `:` separates. In a signature, `:`
# follows the key. Setup snippets quote neither key nor secret, so no character may have a meaning there.
MAX_APP_ID_CHARS = 64
_MAX_KEY_CHARS = 128
APP_ID_RULE = f"1 to {MAX_APP_ID_CHARS} letters, digits, `-`, `_` or `.`, not only dots"
APP_KEY_RULE = f"1 to {_MAX_KEY_CHARS} letters, digits, `-`, `_` or `.`, not only dots"
APP_SECRET_RULE = f"1 to {_MAX_KEY_CHARS} letters, digits or characters of `-_.~+/=@:%^*,`"
_APP_ID = re.compile(rf"(?!\.+\Z)[A-Za-z0-9_.-]{{1,{MAX_APP_ID_CHARS}}}").fullmatch
_APP_KEY = re.compile(rf"(?!\.+\Z)[A-Za-z0-9_.-]{{1,{_MAX_KEY_CHARS}}}").fullmatch
_APP_SECRET = re.compile(rf"[A-Za-z0-9_.~+/=@:%^*,-]{{1,{_MAX_KEY_CHARS}}}").fullmatch


def valid_app_id(app_id: str) -> bool:
    """Whether an app may have this id (APP_ID_RULE)."""
    return _APP_ID(app_id) is not None


def valid_app_key(key: str) -> bool:
    """Whether an app may have this key (APP_KEY_RULE)."""
    return _APP_KEY(key) is not None


def valid_app_secret(secret: str) -> bool:
    """Whether an app may have this secret (APP_SECRET_RULE)."""
    return _APP_SECRET(secret) is not None
