"""Who a user of an OpenID Connect provider is, and what the provider lets the user do here."""

from typing import NamedTuple

__all__ = ["Identity"]


class Identity(NamedTuple):
    """`subject` is "ISSUER SUB", which no other user has; `name` is for people, of at most 48 characters that names
    have. `apps` are the ids of the apps that a viewer may see, None for all. `id_token` is as the provider sent it."""

    subject: str
    name: str
    role: str
    apps: frozenset[str] | None
    id_token: str
