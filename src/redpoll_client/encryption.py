"""Encrypted channels: XSalsa20-Poly1305 with a key for each channel, as Pusher's libraries do it.

The channel's key is SHA-256 of its name and a master key of 32 bytes, which only the back end has. The server sees
ciphertext. Needs PyNaCl: `pip install 'redpoll-client[encrypted]'`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from typing import Any

from redpoll_client.errors import DecryptionFailed

__all__ = ["channel_key", "decrypt", "encrypt", "master_key", "secret_box"]

_KEY_BYTES = 32
_NONCE_BYTES = 24


def master_key(encoded: str) -> bytes:
    """The master key from its base64 form. Raises ValueError unless that has 32 bytes."""
    try:
        key = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise ValueError("encryption_master_key_base64 is not base64") from None
    if len(key) != _KEY_BYTES:
        raise ValueError(f"encryption_master_key_base64 has {len(key)} bytes; {_KEY_BYTES} are needed")
    return key


def channel_key(channel: str, master: bytes) -> bytes:
    """The channel's own key of 32 bytes. Subscribers get its base64 form as `shared_secret` with their signature."""
    return hashlib.sha256(channel.encode() + master).digest()


def secret_box() -> Any:
    """PyNaCl's class. Raises ImportError that says what to install."""
    try:
        from nacl.secret import SecretBox
    except ImportError:
        raise ImportError("encrypted channels need PyNaCl: pip install 'redpoll-client[encrypted]'") from None
    return SecretBox


def encrypt(text: str, key: bytes, publish_id: str | None = None) -> str:
    """The data to publish: JSON with `nonce` and `ciphertext`, both base64.

    The nonce is random, or derived from the text and `publish_id`. So a repeated publish is the same request, and
    another text never gets the same nonce. Equal texts of one channel with the same id look equal.
    """
    nonce = None
    if publish_id is not None:
        nonce = hmac.digest(key, f"{publish_id}\0{text}".encode(), hashlib.sha256)[:_NONCE_BYTES]
    message = secret_box()(key).encrypt(text.encode(), nonce)
    return json.dumps(
        {
            "nonce": base64.b64encode(message.nonce).decode(),
            "ciphertext": base64.b64encode(message.ciphertext).decode(),
        }
    )


def decrypt(data: str, key: bytes) -> str:
    """The text that `encrypt` was given. Raises DecryptionFailed."""
    box = secret_box()
    from nacl.exceptions import CryptoError

    try:
        sealed = json.loads(data)
        nonce, ciphertext = (base64.b64decode(sealed[name], validate=True) for name in ("nonce", "ciphertext"))
        return str(box(key).decrypt(ciphertext, nonce), "utf-8")
    except (ValueError, TypeError, KeyError, RecursionError, CryptoError) as error:
        raise DecryptionFailed(f"the event's data can't be decrypted with this channel's key: {error}") from None
