"""The texts of a first start: an app's credentials as snippets to paste, and how to log in to the dashboard.

This module builds the texts. `redpoll app create` and `redpoll first-login` print them, and so does the supervisor if a
terminal reads them. Into anything else, which may be kept for ever, it prints `where_to_see`.
"""

import ipaddress
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import quote

__all__ = ["FIRST_LOGIN_NAME", "first_login", "how_to_use", "url_host", "where_to_see"]

# The password of the dashboard's first user, in the data folder, which is private. The control plane deletes it at the
# first login.
FIRST_LOGIN_NAME: Final = "first-login"

_TEXT = """\
  id      {id}
  key     {key}
  secret  {secret}

Laravel, .env (BROADCAST_CONNECTION=pusher):

BROADCAST_CONNECTION=pusher
PUSHER_APP_ID={id}
PUSHER_APP_KEY={key}
PUSHER_APP_SECRET={secret}
PUSHER_HOST={host}
PUSHER_PORT={port}
PUSHER_SCHEME=http
PUSHER_APP_CLUSTER=mt1
VITE_PUSHER_APP_KEY={key}
VITE_PUSHER_HOST={host}
VITE_PUSHER_PORT={port}
VITE_PUSHER_SCHEME=http
VITE_PUSHER_APP_CLUSTER=mt1

Laravel, .env (BROADCAST_CONNECTION=reverb), instead:

BROADCAST_CONNECTION=reverb
REVERB_APP_ID={id}
REVERB_APP_KEY={key}
REVERB_APP_SECRET={secret}
REVERB_HOST={host}
REVERB_PORT={port}
REVERB_SCHEME=http
VITE_REVERB_APP_KEY={key}
VITE_REVERB_HOST={host}
VITE_REVERB_PORT={port}
VITE_REVERB_SCHEME=http

pusher-js:

new Pusher("{key}", {{
  cluster: "mt1", wsHost: "{host}", wsPort: {port}, wssPort: {tls_port},
  forceTLS: false, enabledTransports: ["ws", "wss"],
}})

Server libraries that read PUSHER_URL (Node.js, Ruby):

PUSHER_URL=http://{key}:{quoted_secret}@{host}:{port}/apps/{id}

Python (its library takes no port from PUSHER_URL):

pusher.Pusher(app_id="{id}", key="{key}", secret="{secret}",
              host="{host}", port={port}, ssl=False)
"""


def how_to_use(app: Mapping[str, Any], host: str, port: int, tls_port: int | None = None) -> str:
    """The text for an app `{id, key, secret, …}` of a server that listens at `host` and `port`.

    `wssPort` is `port` when there is no TLS port or it is not known yet (0). The cluster is a placeholder: pusher-js
    requires one, and the server ignores it.
    """
    return _TEXT.format(
        id=app["id"],
        key=app["key"],
        secret=app["secret"],
        quoted_secret=quote(app["secret"], safe=""),
        host=url_host(host),
        port=port,
        tls_port=tls_port or port,
    )


_LOGIN = """\
redpoll created the user admin for the dashboard at {url}

  password  {password}

This password works for the first login only, which asks you to choose your own. Until then it is also in {path}
"""


def first_login(url: str, password: str, path: str) -> str:
    """The text for the dashboard's first user. `url` is the control port's, `path` the file with the password."""
    return _LOGIN.format(url=url, password=password, path=path)


def where_to_see(created: Iterable[str], folder: str) -> str:
    """The sentence for a log, which may have no secrets: `created` is what the first start created ("an app"), `folder`
    the data folder."""
    command = f"redpoll first-login --data-dir {shlex.quote(folder)}"
    return f"redpoll created {' and '.join(created)} for the first start; this shows how to use it: {command}"


def url_host(host: str) -> str:
    """The host for a URL: IPv6 in brackets, and loopback in place of "any address"."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "[::1]"
    return f"[{host}]" if address.version == 6 else host
