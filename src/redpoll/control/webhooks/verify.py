"""POST webhooks/verify: checks a webhook's signature, for receivers that don't compute it themselves."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from redpoll.control.http.request import Request
from redpoll.control.http.response import Response
from redpoll.control.http.schemas import VerifyResponse
from redpoll.control.webhooks.payloads import sign
from redpoll.protocol.errors import ApiError, fault_of

__all__ = ["SecretsOf", "Verify", "Webhook"]

# Takes an app id. Returns the valid secrets of its endpoints by endpoint id; two during a rotation.
SecretsOf = Callable[[str], Awaitable[Mapping[str, Sequence[str]]]]

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

    async def verify(self, request: Request) -> Response:
        """Answers `{"valid": true, "endpoint_id": …}` or `{"valid": false}`, never the right signature.

        The answer is also false if the app doesn't have the endpoint. Raises ApiError for a malformed body.
        """
        try:
            delivery = _decoder.decode(request.body)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as fault:
            raise ApiError("bad_request", f"the body is not what this endpoint takes: {fault_of(fault)}") from None
        body, signature = delivery.payload.encode(), delivery.signature.encode()
        signer: str | None = None
        for endpoint_id, secrets in (await self._secrets_of(request.app.id)).items():
            if delivery.endpoint_id is not None and delivery.endpoint_id != endpoint_id:
                continue
            for secret in secrets:
                # Compare all of them, so that the time doesn't reveal which one matched.
                if hmac.compare_digest(sign(secret, body).encode(), signature):
                    signer = endpoint_id
        if signer is None:
            return request.ok(_encode(VerifyResponse(False)))
        return request.ok(_encode(VerifyResponse(True, signer)))
