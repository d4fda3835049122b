"""Where a `Subscriber` gets its signatures: from the app's secret, from an endpoint of the back end, or from a
function."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp

from redpoll_client.errors import SignInRefused, SubscriptionRefused, Unavailable, excerpt
from redpoll_client.names import is_encrypted
from redpoll_client.settings import Endpoint
from redpoll_client.signatures import sign_channel, sign_user

__all__ = ["Authorizer", "ChannelAuth", "UserAuth"]

# A URL to post `socket_id` and `channel_name` to, as pusher-js does; or a function of both.
ChannelAuth = str | Callable[[str, str], Mapping[str, Any] | Awaitable[Mapping[str, Any]]]
# A URL to post `socket_id` to; or a function of it.
UserAuth = str | Callable[[str], Mapping[str, Any] | Awaitable[Mapping[str, Any]]]

_MAX_ANSWER_BYTES = 1024 * 1024


class Authorizer:
    """Signs subscriptions and sign-ins. An endpoint's or a function's answer is what `sign_channel` and `sign_user`
    return.

    Raises SubscriptionRefused and SignInRefused for a final no, Unavailable when asking later may help.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        auth: ChannelAuth | None,
        user_auth: UserAuth | None,
        headers: Mapping[str, str],
        member: Mapping[str, Any] | None,
        master_key: bytes | None,
        timeout_s: float,
    ) -> None:
        self._endpoint = endpoint
        self._auth = auth
        self._user_auth = user_auth
        self._headers = dict(headers)
        self._member = member
        self._master_key = master_key
        self._timeout_s = timeout_s

    async def channel(self, session: aiohttp.ClientSession, socket_id: str, channel: str) -> dict[str, str]:
        """`auth` and, where the channel has them, `channel_data` and `shared_secret`."""
        if self._auth is None:
            if not self._endpoint.secret:
                raise SubscriptionRefused(channel, "it needs a signature: give auth=, or a url with the secret")
            member = self._member if channel.startswith("presence-") else None
            try:
                return sign_channel(
                    self._endpoint.key,
                    self._endpoint.secret,
                    socket_id,
                    channel,
                    member,
                    master_key=self._master_key,
                )
            except (TypeError, ValueError) as error:
                raise SubscriptionRefused(channel, str(error)) from None
        if isinstance(self._auth, str):
            form = {"socket_id": socket_id, "channel_name": channel}
            status, answer = await self._ask(session, self._auth, form)
            if not isinstance(answer, dict):
                text = f"the auth endpoint answered {status}: {answer}"
                raise SubscriptionRefused(channel, text, "AuthError", status)
        else:
            returned = await self._call(self._auth, socket_id, channel)
            if returned is None:
                raise SubscriptionRefused(channel, "the auth function returned no mapping", "AuthError")
            answer = returned
        wanted = ["auth", *(["channel_data"] if channel.startswith("presence-") else [])]
        if is_encrypted(channel):
            wanted.append("shared_secret")
        if not all(isinstance(answer.get(name), str) for name in wanted):
            text = f"the auth endpoint's answer lacks one of {', '.join(wanted)}"
            raise SubscriptionRefused(channel, text, "AuthError")
        return {name: answer[name] for name in ("auth", "channel_data", "shared_secret") if answer.get(name)}

    async def user(
        self, session: aiohttp.ClientSession, socket_id: str, user: Mapping[str, Any] | None
    ) -> dict[str, str]:
        """`auth` and `user_data`."""
        if user is not None and self._endpoint.secret:
            return sign_user(self._endpoint.key, self._endpoint.secret, socket_id, user)
        if self._user_auth is None:
            raise SignInRefused("give user_auth=, or a url with the secret and the user")
        if isinstance(self._user_auth, str):
            status, answer = await self._ask(session, self._user_auth, {"socket_id": socket_id})
            if not isinstance(answer, dict):
                raise SignInRefused(f"the sign-in endpoint answered {status}: {answer}")
        else:
            returned = await self._call(self._user_auth, socket_id)
            if returned is None:
                raise SignInRefused("the user_auth function returned no mapping")
            answer = returned
        if not (isinstance(answer.get("auth"), str) and isinstance(answer.get("user_data"), str)):
            raise SignInRefused("the sign-in endpoint's answer lacks auth or user_data")
        return {"auth": answer["auth"], "user_data": answer["user_data"]}

    async def _call(self, function: Callable[..., Any], *arguments: str) -> dict[str, Any] | None:
        """What the function returns; None if that is no mapping. It may ask a server, so a fault of it is not final."""
        try:
            answer = function(*arguments)
            if inspect.isawaitable(answer):
                answer = await asyncio.wait_for(answer, self._timeout_s)
        except (SubscriptionRefused, SignInRefused, Unavailable):
            raise
        except Exception as error:
            raise Unavailable(f"the auth function failed: {str(error) or type(error).__name__}") from error
        return dict(answer) if isinstance(answer, Mapping) else None

    async def _ask(
        self, session: aiohttp.ClientSession, url: str, form: dict[str, str]
    ) -> tuple[int, dict[str, Any] | str]:
        """The answer's status, and its JSON object, or the text of a refusal."""
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        try:
            async with session.post(
                url, data=form, headers=self._headers, timeout=timeout, allow_redirects=False
            ) as response:
                body = await _read(response)
                kind = response.headers.get("Content-Type", "")
                if response.status >= 500 or response.status == 429:
                    raise Unavailable(f"{url}: answered {response.status}: {excerpt(kind, body)}")
                if response.status != 200:
                    return response.status, excerpt(kind, body)
                try:
                    answer = json.loads(body)
                except ValueError:
                    return response.status, f"no JSON: {excerpt(kind, body)}"
                return response.status, answer if isinstance(answer, dict) else "no JSON object"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(f"{url}: no answer: {str(error) or type(error).__name__}") from error


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The whole body. Raises ClientPayloadError for one that is longer than any signature."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > _MAX_ANSWER_BYTES:
            raise aiohttp.ClientPayloadError(f"the answer has more than {_MAX_ANSWER_BYTES} bytes")
    return bytes(body)
