"""Whether a request is signed by an app, as far as a worker can tell.

Control authenticates every request (control/http/authentication.py). The worker asks only where it would otherwise
refuse a request because strangers have taken their share. It knows the apps of the directory and the usual ways: a
signature in the usual layout, or key and secret in headers. It has no tokens.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Final

from redpoll._http import signed_params
from redpoll.http.messages import unpack_fields
from redpoll.protocol import auth
from redpoll.protocol.apps import App
from redpoll.protocol.errors import ApiError

__all__ = ["Credentials"]

_APP_ID: Final = re.compile(r"/apps/([^/]{1,100})/")


class Credentials:
    """`apps`: those of the directory, by id; not a copy. `clock` returns Unix time, for timestamps of signatures."""

    def __init__(self, apps: Mapping[str, App], clock: Callable[[], float] = time.time) -> None:
        self._apps = apps
        self._clock = clock

    def are_right(self, method: bytes, target: bytes, fields: bytes) -> bool:
        """Whether an app's caller sent this request. `fields` as of http/messages.pack_fields. The body, which may not
        be there yet, isn't compared with its digest."""
        path, _, query = target.decode("utf-8", "surrogateescape").partition("?")
        match = _APP_ID.search(path)
        if match is None:
            return False
        app = self._apps.get(match[1])
        # Libraries leave a prefix of the path out of what they sign (control/http/authentication.py).
        short_path = path[match.start() :] if match.start() else None
        if query and signed_params(
            method.decode(), path, query, None, app, auth.hashes_of, self._clock(), auth.MAX_SKEW_S, short_path
        ):
            return app is not None
        headers = unpack_fields(fields)
        try:
            auth.check_pair(app, headers.get("X-Service-Key", ""), headers.get("X-Service-Secret", ""))
        except (ApiError, UnicodeError):
            return False
        return True
