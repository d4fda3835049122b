"""POST webhooks/verify: whether a signature is one of ours, for receivers that would rather ask (protocol.md 15.3)."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from redpoll.control.request import Request
from redpoll.control.response import Response
from redpoll.control.schemas import VerifyAnswer
from redpoll.control.webhooks.payloads import sign
from redpoll.protocol.errors import ApiError, fault_of

__all__ = ["SecretsOf", "Verify", "Webhook"]

# The secrets that are good for each endpoint of an app, by the endpoint's id: more than one while one is replaced.
SecretsOf = Callable[[str], Awaitable[Mapping[str, Sequence[str]]]]

_encode: Final = msgspec.json.Encoder().encode


class Webhook(msgspec.Struct, gc=False):
    """What a receiver got."""

    payload: Annotated[str, Meta(description="The raw body, as text.")]
    signature: Annotated[str, Meta(description="Its `X-Service-Signature`.")]
    endpoint_id: Annotated[str | None, Meta(description="Who must have signed it; any endpoint without it.")] = None


_decoder: Final = msgspec.json.Decoder(Webhook)


class Verify:
    """The handler. `secrets_of` is the endpoints'."""

    def __init__(self, secrets_of: SecretsOf) -> None:
        self._secrets_of = secrets_of

    async def verify(self, call: Request) -> Response:
        """`{"valid": true, "endpoint_id": …}` or `{"valid": false}`, never what would have been right.

        False is also said of an endpoint that the app doesn't have. Raises ApiError for another body.
        """
        try:
            asked = _decoder.decode(call.body)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as fault:
            raise ApiError("bad_request", f"the body is not what this endpoint takes: {fault_of(fault)}") from None
        body, signature = asked.payload.encode(), asked.signature.encode()
        found: str | None = None
        for endpoint_id, secrets in (await self._secrets_of(call.app.id)).items():
            if asked.endpoint_id is not None and asked.endpoint_id != endpoint_id:
                continue
            for secret in secrets:
                # All are compared, so that the time tells nothing of which came near.
                if hmac.compare_digest(sign(secret, body).encode(), signature):
                    found = endpoint_id
        if found is None:
            return call.answer(_encode(VerifyAnswer(False)))
        return call.answer(_encode(VerifyAnswer(True, found)))
