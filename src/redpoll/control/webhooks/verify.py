"""POST webhooks/verify: checks a webhook's signature, for receivers that don't compute it themselves."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from redpoll.control.http.request import Request
from redpoll.control.http.response import Response
from redpoll.control.http.schemas import VerifyResponse
from redpoll.control.webhooks.payloads import sign
from redpoll.loop.turns import Turns
from redpoll.protocol.errors import ApiError, fault_of

__all__ = ["SecretsOf", "Verify", "Webhook"]

# Takes an app id. Returns the valid secrets of its endpoints by endpoint id; two during a rotation.
SecretsOf = Callable[[str], Awaitable[Mapping[str, Sequence[str]]]]

# What is hashed in the loop takes some 50 µs, less than a thread needs to begin.
_MAX_HASHED_BYTES: Final = 65_536
# Larger requests of an app that wait. Each keeps its body, of at most 1 MiB.
_MAX_WAITING: Final = 16

_encode: Final = msgspec.json.Encoder().encode


class Webhook(msgspec.Struct, gc=False):
    """A received delivery."""

    payload: Annotated[str, Meta(description="The raw body as text.")]
    signature: Annotated[str, Meta(description="Its `X-Service-Signature`.")]
    endpoint_id: Annotated[str | None, Meta(description="The endpoint that must have signed it. Default: any.")] = None


_decoder: Final = msgspec.json.Decoder(Webhook)


class Verify:
    """The handler."""

    def __init__(self, secrets_of: SecretsOf) -> None:
        self._secrets_of = secrets_of
        self._turns = Turns(_MAX_WAITING)

    async def verify(self, request: Request) -> Response:
        """Answers `{"valid": true, "endpoint_id": …}` or `{"valid": false}`, never the right signature.

        The answer is also false if the app doesn't have the endpoint. Raises ApiError for a malformed body, and
        TooManyWaiting.
        """
        try:
            delivery = _decoder.decode(request.body)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as fault:
            raise ApiError("bad_request", f"the body is not what this endpoint takes: {fault_of(fault)}") from None
        body, signature = delivery.payload.encode(), delivery.signature.encode()
        secrets = [
            (endpoint_id, secret)
            for endpoint_id, valid in (await self._secrets_of(request.app.id)).items()
            if delivery.endpoint_id in (None, endpoint_id)
            for secret in valid
        ]
        if len(body) * len(secrets) <= _MAX_HASHED_BYTES:
            signer = _signer(secrets, body, signature)
        else:
            async with self._turns.of(request.app.id):
                signer = await asyncio.to_thread(_signer, secrets, body, signature)
        if signer is None:
            return request.ok(_encode(VerifyResponse(False)))
        return request.ok(_encode(VerifyResponse(True, signer)))


def _signer(secrets: Sequence[tuple[str, str]], body: bytes, signature: bytes) -> str | None:
    """The id of the endpoint that has signed the body. `secrets` are pairs of an endpoint id and a secret."""
    signer: str | None = None
    for endpoint_id, secret in secrets:
        # Compare all of them, so that the time doesn't reveal which one matched.
        if hmac.compare_digest(sign(secret, body).encode(), signature):
            signer = endpoint_id
    return signer
