"""The address of an app, which the doctor checks and the command line uses, in the forms that people have at hand.

`http[s]://KEY:SECRET@HOST[:PORT]/apps/ID` is what Pusher's server libraries read from PUSHER_URL. Its secret allows to
publish and to sign subscriptions. `ws[s]://HOST[:PORT]/app/KEY` is what a browser connects to.
"""

import hashlib
import hmac
import time
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import SplitResult, quote, unquote, urlencode, urlsplit

__all__ = ["Target", "TargetError", "parse"]

_FORMS = "expected ws[s]://HOST[:PORT]/app/KEY or http[s]://KEY:SECRET@HOST[:PORT]/apps/ID"
_DEFAULT_PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443}


class TargetError(ValueError):
    """The address can't be used. The text says what is expected."""


class Target(NamedTuple):
    """Host and port as a browser would use them. `secret` and `app_id` are empty when nothing can be published.

    `prefix` is a path that a proxy expects before `/app` and `/apps`, without a slash at its end.
    """

    host: str
    port: int
    secure: bool
    key: str
    secret: str = ""
    app_id: str = ""
    prefix: str = ""

    @property
    def origin(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.secure else 'http'}://{host}:{self.port}"

    @property
    def socket_path(self) -> str:
        return f"{self.prefix}/app/{self.key}?protocol=7&client=redpoll-doctor&version=1"

    def signed_path(
        self,
        body: bytes | None,
        *,
        method: str = "POST",
        path: str = "/events",
        params: Mapping[str, str] | None = None,
    ) -> str:
        """Path and query of a signed request (`protocol/README.md "Request signing"`).

        `path` is below `/apps/ID`, percent-encoded; `params` are not.
        """
        path = f"/apps/{self.app_id}{path}"
        query = {
            **(params or {}),
            "auth_key": self.key,
            "auth_timestamp": str(int(time.time())),
            "auth_version": "1.0",
        }
        if body is not None:
            query["body_md5"] = hashlib.md5(body, usedforsecurity=False).hexdigest()
        signed = "&".join(f"{name}={value}" for name, value in sorted(query.items()))
        text = f"{method}\n{path}\n{signed}"
        signature = hmac.new(self.secret.encode(), text.encode(), hashlib.sha256).hexdigest()
        return f"{self.prefix}{path}?{urlencode(query, quote_via=quote)}&auth_signature={signature}"


def parse(url: str, *, keyless: bool = False) -> Target:
    """Reads an address in either form. Raises TargetError, whose text quotes nothing: in an address that can't be read,
    the secret may be anywhere. `keyless`: a token replaces key and secret, which may be left out."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise TargetError(f"this isn't the address of an app: {_FORMS}") from None
    if parts.scheme not in _DEFAULT_PORTS:
        raise TargetError(f"this isn't the address of an app: {_FORMS}")
    try:
        port = parts.port or _DEFAULT_PORTS[parts.scheme]
    except ValueError:
        raise TargetError(f"the port of the address isn't a number from 1 to 65535: {_FORMS}") from None
    if not parts.hostname:
        raise TargetError(f"the address names no host: {_FORMS}")
    try:
        parts.hostname.encode("idna")
    except UnicodeError:
        raise TargetError("the host's name has an empty part or one of more than 63 characters") from None
    secure = parts.scheme in ("https", "wss")
    if parts.scheme in ("ws", "wss"):
        prefix, key = _split(parts, "/app/")
        return Target(parts.hostname, port, secure, key, prefix=prefix)
    prefix, app_id = _split(parts, "/apps/")
    key, secret = unquote(parts.username or ""), unquote(parts.password or "")
    if not key and not keyless:
        raise TargetError(f"the address names no key: {_FORMS}")
    return Target(parts.hostname, port, secure, key, secret, app_id if secret or keyless else "", prefix)


def _split(parts: SplitResult, word: str) -> tuple[str, str]:
    prefix, found, name = parts.path.rpartition(word)
    name = name.strip("/")
    if not found or not name or "/" in name:
        kind = "KEY" if word == "/app/" else "ID"
        raise TargetError(f"with {parts.scheme}, the path must end in {word}{kind}: {_FORMS}")
    return prefix, name
