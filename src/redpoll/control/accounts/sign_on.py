"""Single sign-on at an OpenID Connect provider: the authorization code flow with PKCE (OpenID Connect Core 1.0 section
3.1, RFC 7636, RFC 9207).

`SignOn.begin` makes the address of the provider's login page and a cookie; `SignOn.returned` checks what the browser
brings back from there; `SignOn.finish` fetches the ID token, checks it, and returns who the user is. Nothing is kept
between the first two but in the cookie, so that another node may finish what this one began. Signatures are checked by
joserfc.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, quote, urlencode

import aiohttp
import msgspec

from redpoll.config.settings import Settings
from redpoll.config.single_sign_on import ALGORITHMS, MAX_BYTES, WITHIN_S, document_faults, document_url
from redpoll.control.accounts.identity import Identity

__all__ = ["BEGUN_WITHIN_S", "CLOCKS_WITHIN_S", "Begun", "Returned", "SignOn", "SignOnError"]

# How long a user may take at the provider.
BEGUN_WITHIN_S: Final = 600.0
# An ID token was made a moment ago. A larger difference means that a clock is wrong.
CLOCKS_WITHIN_S: Final = 120.0
_DOCUMENT_FOR_S: Final = 3_600.0
_FAILED_FOR_S: Final = 2.0
# A key that the provider withdrew is accepted for this long.
_KEYS_FOR_S: Final = 3_600.0
# Unknown key ids, and tokens without one, cause a new fetch of the keys, at most as often.
_KEYS_AGAIN_AFTER_S: Final = 30.0
_MAX_TOKEN_CHARS: Final = 16_384
_MAX_APPS: Final = 1_000
_ERROR: Final = re.compile(r"[\x20-\x7e]{1,100}").fullmatch
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9._@-]+")


class SignOnError(Exception):
    """A login at the provider was refused. `reason` is for the log; of it, the page shows what stands before the colon.
    `check` says what to check. `without_role` is the subject of a user whose ID token is right but names no role."""

    def __init__(self, reason: str, check: str, without_role: str = "") -> None:
        super().__init__(reason, check)
        self.reason = reason
        self.check = check
        self.without_role = without_role

    def __str__(self) -> str:
        return self.reason


class Begun(NamedTuple):
    """`url` is where the browser goes, `cookie` what it must bring back."""

    url: str
    cookie: str


class Returned(NamedTuple):
    """A browser that came back from the provider with the cookie and the state of a login that began here. `answer` is
    the callback's query, `following` the page that the login was for."""

    answer: Mapping[str, str]
    nonce: str
    verifier: str
    following: str


class _State(msgspec.Struct, frozen=True):
    """What is in the cookie. Times are Unix seconds."""

    state: str
    nonce: str
    verifier: str
    following: str
    at: float


_decode_state: Final = msgspec.json.Decoder(_State).decode


class SignOn:
    """The provider of `oidc_issuer`. `clock` returns Unix time in seconds."""

    def __init__(
        self, settings: Settings, clock: Callable[[], float] = time.time, *, failed_for_s: float = _FAILED_FOR_S
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._failed_for_s = failed_for_s
        # Nodes of a cluster have the same secret. A public client has none, and its cookies are of one process.
        secret = settings.oidc_client_secret or secrets.token_hex(32)
        self._cookie_key = hashlib.sha256(f"redpoll single sign-on {secret}".encode()).digest()
        self._document: dict[str, Any] = {}
        self._document_until = 0.0
        self._fetching = asyncio.Lock()
        self._failed: SignOnError | None = None
        self._failed_until = 0.0
        self._keys: Any = None
        self._keys_at = 0.0

    # -- to the provider

    async def begin(self, redirect_uri: str, following: str) -> Begun:
        """`following` is the page after the login. Raises SignOnError."""
        document = await self._provider()
        state = _State(
            secrets.token_urlsafe(24), secrets.token_urlsafe(24), secrets.token_urlsafe(48), following, self._clock()
        )
        challenge = base64.urlsafe_b64encode(hashlib.sha256(state.verifier.encode()).digest()).rstrip(b"=")
        query = {
            "response_type": "code",
            "client_id": self._settings.oidc_client_id,
            "redirect_uri": redirect_uri,
            "scope": self._settings.oidc_scope,
            "state": state.state,
            "nonce": state.nonce,
            "code_challenge": challenge.decode(),
            "code_challenge_method": "S256",
        }
        return Begun(_with_query(document["authorization_endpoint"], query), self._sealed(state))

    def _sealed(self, state: _State) -> str:
        text = base64.urlsafe_b64encode(msgspec.json.encode(state)).decode()
        return f"{text}.{self._mac(text)}"

    def _mac(self, text: str) -> str:
        return hmac.new(self._cookie_key, text.encode(), hashlib.sha256).hexdigest()

    def _opened(self, cookie: str) -> _State:
        text, _, mac = cookie.partition(".")
        if not hmac.compare_digest(mac.encode(), self._mac(text).encode()):
            raise SignOnError("the cookie of the login is missing or not ours", _CHECK_STATE)
        try:
            state = _decode_state(base64.urlsafe_b64decode(text))
        except (msgspec.DecodeError, binascii.Error, ValueError):
            raise SignOnError("the cookie of the login can't be read", _CHECK_STATE) from None
        if not -CLOCKS_WITHIN_S < self._clock() - state.at < BEGUN_WITHIN_S:
            raise SignOnError("the login took longer than ten minutes", _CHECK_STATE)
        return state

    # -- back from the provider

    def returned(self, query: str, cookie: str) -> Returned:
        """What a browser brings back: `query` is that of the callback. Asks nobody. Raises SignOnError."""
        state = self._opened(cookie)
        try:
            answer = dict(parse_qsl(query, keep_blank_values=True, max_num_fields=20))
        except ValueError:
            raise SignOnError("the provider's answer has more than 20 fields", _CHECK_STATE) from None
        if not hmac.compare_digest(answer.get("state", "").encode(), state.state.encode()):
            raise SignOnError("wrong state: the answer belongs to another login", _CHECK_STATE)
        return Returned(answer, state.nonce, state.verifier, state.following)

    async def finish(self, returned: Returned, redirect_uri: str) -> Identity:
        """Who came back. Raises SignOnError."""
        answer = returned.answer
        document = await self._provider()
        if answer.get("iss", document["issuer"]) != document["issuer"]:
            raise SignOnError("wrong issuer in the provider's answer", _CHECK_ISSUER)
        if "code" not in answer:
            error = answer.get("error", "")
            shown = error if _ERROR(error) else "no code and no error"
            raise SignOnError(f"the provider refused the login: {shown}", _CHECK_REFUSED.format(shown))
        token = await self._token(document, answer["code"], returned.verifier, redirect_uri)
        claims = await self._claims(document, token)
        self._check(claims, returned.nonce)
        return self._identity(claims, token)

    async def _token(self, document: Mapping[str, Any], code: str, verifier: str, redirect_uri: str) -> str:
        """Exchanges the code for the ID token."""
        body = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": redirect_uri,
            "code_verifier": verifier,
        }
        headers = {"Accept": "application/json"}
        client, secret = self._settings.oidc_client_id, self._settings.oidc_client_secret
        if not secret:
            body["client_id"] = client
        elif "client_secret_basic" in document.get("token_endpoint_auth_methods_supported", ["client_secret_basic"]):
            # RFC 6749 section 2.3.1: both are form-encoded first.
            pair = f"{quote(client, safe='')}:{quote(secret, safe='')}"
            headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
        else:
            body |= {"client_id": client, "client_secret": secret}
        status, answer = await _fetch(document["token_endpoint"], headers=headers, body=body)
        token = answer.get("id_token") if isinstance(answer, dict) else None
        if status != 200 or not isinstance(token, str) or len(token) > _MAX_TOKEN_CHARS:
            error = answer.get("error", "") if isinstance(answer, dict) else ""
            shown = error if isinstance(error, str) and _ERROR(error) else "no ID token"
            raise SignOnError(f"the provider gave no ID token: {status}, {shown}", _CHECK_TOKEN.format(shown))
        return token

    async def _claims(self, document: Mapping[str, Any], token: str) -> dict[str, Any]:
        """The claims of an ID token whose signature is right."""
        from joserfc import errors, jwt

        algorithm, key_id = _head_of(token)
        if algorithm not in ALGORITHMS:
            raise SignOnError(f"wrong algorithm: the ID token is signed with {algorithm!r}", _CHECK_ALGORITHM)
        keys = await self._keys_of(document, key_id)
        try:
            return dict(jwt.decode(token, keys, algorithms=[algorithm]).claims)
        except errors.BadSignatureError:
            reason = "wrong signature of the ID token"
        except (errors.JoseError, ValueError) as error:
            # Such as no key with this id, or a key for another algorithm.
            reason = f"wrong signature of the ID token: {type(error).__name__}"
        raise SignOnError(reason, _CHECK_SIGNATURE)

    async def _keys_of(self, document: Mapping[str, Any], key_id: str | None) -> Any:
        """The provider's keys, fetched again when they are an hour old, or lack the key of a token."""
        now = time.monotonic()
        keys = self._keys.keys if self._keys is not None else ()
        known = key_id is not None and any(key.kid == key_id for key in keys)
        lasts_s = _KEYS_FOR_S if known else _KEYS_AGAIN_AFTER_S
        if self._keys is None or now - self._keys_at > lasts_s:
            status, key_set = await _fetch(document["jwks_uri"])
            published = key_set.get("keys") if isinstance(key_set, dict) else None
            if status != 200 or not isinstance(published, list):
                raise SignOnError(f"the provider's keys can't be read: {status}", _CHECK_SIGNATURE)
            self._keys, self._keys_at = _key_set(published), now
        return self._keys

    def _check(self, claims: Mapping[str, Any], nonce: str) -> None:
        """OpenID Connect Core section 3.1.3.7."""
        client = self._settings.oidc_client_id
        if claims.get("iss") != self._settings.oidc_issuer:
            raise SignOnError(f"wrong issuer of the ID token: {claims.get('iss')!r}", _CHECK_ISSUER)
        audience = claims.get("aud")
        audiences = audience if isinstance(audience, list) else [audience]
        party = claims.get("azp", client if len(audiences) == 1 else None)
        if client not in audiences or party != client:
            raise SignOnError(f"wrong audience of the ID token: {audience!r}", _CHECK_AUDIENCE)
        made_at, ends_at = claims.get("iat"), claims.get("exp")
        if not isinstance(made_at, int | float) or not isinstance(ends_at, int | float):
            raise SignOnError("the ID token has no times", _CHECK_CLOCK)
        off = self._clock() - made_at
        if abs(off) > CLOCKS_WITHIN_S or self._clock() - ends_at > CLOCKS_WITHIN_S:
            ahead = "ahead of" if off > 0 else "behind"
            reason = f"a clock is wrong: this machine's is {abs(off):.0f} s {ahead} the provider's"
            raise SignOnError(reason, _CHECK_CLOCK)
        claimed = claims.get("nonce")
        if not isinstance(claimed, str) or not hmac.compare_digest(claimed.encode(), nonce.encode()):
            raise SignOnError("wrong nonce of the ID token", _CHECK_STATE)
        if not isinstance(claims.get("sub"), str) or not 0 < len(claims["sub"]) <= 255:
            raise SignOnError("the ID token has no sub", _CHECK_TOKEN.format("no sub"))

    def _identity(self, claims: Mapping[str, Any], token: str) -> Identity:
        settings = self._settings
        subject = f"{settings.oidc_issuer} {claims['sub']}"
        roles = _words(_claim(claims, settings.oidc_role_claim))
        role = next(
            (
                role
                for role, name in (("admin", settings.oidc_admin_role), ("viewer", settings.oidc_viewer_role))
                if name in roles
            ),
            "",
        )
        if not role:
            shown = ", ".join(sorted(roles)[:10])[:200] or "none"
            reason = f"the user {claims['sub']!r} has no role here: roles {shown}"
            raise SignOnError(reason, _check_role(settings), subject)
        name = next(
            (
                cleaned
                for claim in ("preferred_username", "email", "name", "sub")
                if isinstance(claims.get(claim), str)
                and (cleaned := _NOT_IN_NAMES.sub("-", claims[claim]).strip("-.@_")[:48])
            ),
            "user",
        )
        apps = _claim(claims, settings.oidc_apps_claim)
        allowed = None if apps is None else frozenset(list(_words(apps))[:_MAX_APPS])
        return Identity(subject, name, role, allowed, token)

    # -- logout

    async def logout_url(self, id_token: str, after: str) -> str | None:
        """Where the browser ends the session at the provider; None if the provider offers nothing or can't be asked."""
        try:
            endpoint = (await self._provider()).get("end_session_endpoint")
        except SignOnError:
            return None
        if not isinstance(endpoint, str) or not endpoint.startswith(("https://", "http://")):
            return None
        query = {
            "id_token_hint": id_token,
            "client_id": self._settings.oidc_client_id,
            "post_logout_redirect_uri": after,
        }
        return _with_query(endpoint, query)

    async def _provider(self) -> dict[str, Any]:
        """The provider's document, which is fetched once an hour. After a failure, strangers who ask for the login page
        cause no more than one request at a time, and one in two seconds."""
        async with self._fetching:
            if self._failed is not None and time.monotonic() < self._failed_until:
                raise self._failed
            try:
                return await self._fetched()
            except SignOnError as error:
                self._failed, self._failed_until = error, time.monotonic() + self._failed_for_s
                raise

    async def _fetched(self) -> dict[str, Any]:
        now = time.monotonic()
        if not self._document or now > self._document_until:
            issuer = self._settings.oidc_issuer
            status, document = await _fetch(document_url(issuer))
            if status != 200:
                raise SignOnError(f"the provider's document answers {status}", _CHECK_ISSUER)
            faults = document_faults(document, issuer)
            if faults:
                raise SignOnError(f"the provider's document can't be used: {'; '.join(faults)}", _CHECK_ISSUER)
            assert isinstance(document, dict)
            self._document, self._document_until = document, now + _DOCUMENT_FOR_S
        return self._document


async def _fetch(
    url: str, *, headers: Mapping[str, str] | None = None, body: Mapping[str, str] | None = None
) -> tuple[int, object]:
    """Status and JSON of an answer of the provider. Raises SignOnError if there is none."""
    timeout = aiohttp.ClientTimeout(total=WITHIN_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=True) as session,
            session.request(
                "GET" if body is None else "POST", url, headers=headers, data=body, allow_redirects=False
            ) as answer,
        ):
            text = await answer.content.read(MAX_BYTES)
            while len(text) < MAX_BYTES and (more := await answer.content.read(MAX_BYTES - len(text))):
                text += more
            return answer.status, msgspec.json.decode(text) if text else None
    except msgspec.DecodeError:
        raise SignOnError(f"the provider answers no JSON: {url}", _CHECK_ISSUER) from None
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        shown = f"no answer within {WITHIN_S:g} s" if isinstance(error, TimeoutError) else f"{error}"
        raise SignOnError(f"the provider can't be reached: {url}: {shown}", _CHECK_REACH) from None


def _key_set(published: list[Any]) -> Any:
    """The keys that we can use. RFC 7517 section 5: those of other kinds are ignored. Raises SignOnError."""
    from joserfc.errors import JoseError
    from joserfc.jwk import KeySet

    keys: list[Any] = []
    fault = "there is none"
    for key in published:
        if not isinstance(key, dict) or key.get("use") == "enc":
            continue
        try:
            keys += KeySet.import_key_set({"keys": [key]}).keys
        except (JoseError, KeyError, TypeError, ValueError, AttributeError) as error:
            fault = type(error).__name__
    if not keys:
        raise SignOnError(f"the provider's keys can't be read: {fault}", _CHECK_SIGNATURE)
    return KeySet(keys)


def _head_of(token: str) -> tuple[object, str | None]:
    """Algorithm and key id of a token, before anything is checked."""
    try:
        part = token.partition(".")[0]
        head = msgspec.json.decode(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)), type=dict[str, Any])
    except (msgspec.DecodeError, binascii.Error, ValueError):
        raise SignOnError("the ID token can't be read", _CHECK_ALGORITHM) from None
    key_id = head.get("kid")
    return head.get("alg"), key_id if isinstance(key_id, str) else None


def _claim(claims: Mapping[str, Any], path: str) -> object:
    """A claim by its name, or by a path with dots. None if there is none."""
    if path in claims:
        claim: object = claims[path]
        return claim
    value: object = claims
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _words(value: object) -> set[str]:
    """One or a list, or a string with spaces or commas. Ids of apps are digits: some providers send them as numbers."""
    if isinstance(value, str):
        return set(re.split(r"[\s,]+", value)) - {""}
    words = value if isinstance(value, list) else [value]
    return {str(word) for word in words if isinstance(word, str | int) and not isinstance(word, bool)}


def _with_query(url: str, query: Mapping[str, str]) -> str:
    return f"{url}{'&' if '?' in url else '?'}{urlencode(query)}"


_CHECK_STATE: Final = (
    "Begin again from the login page, in the same browser, and finish within ten minutes. If it happens each time, "
    "check that cookies are allowed, and that the dashboard has one address."
)
_CHECK_ISSUER: Final = (
    "An admin checks that oidc_issuer is exactly the provider's issuer, with or without a slash at its end: "
    "`redpoll doctor` compares them."
)
_CHECK_AUDIENCE: Final = "An admin checks that oidc_client_id is the id that the provider has for redpoll."
_CHECK_ALGORITHM: Final = (
    "An admin sets the signature of ID tokens at the provider to RS256 or ES256, not to HS256 and not to none."
)
_CHECK_SIGNATURE: Final = (
    "An admin checks that the address of the provider's keys (jwks_uri) is the provider's own. If keys were just "
    "changed there, try again in a minute."
)
_CHECK_CLOCK: Final = (
    "An admin compares the clocks of this machine and of the provider's, and sets them by NTP: `timedatectl` shows the "
    "state, `redpoll doctor` the difference."
)
_CHECK_REACH: Final = (
    "Try again in a minute. If it goes on, an admin checks whether this machine reaches the provider (`redpoll "
    "doctor`), and logs in with a local user meanwhile."
)
_CHECK_TOKEN: Final = (
    "An admin checks oidc_client_secret, and that the address of this page up to the question mark is registered at "
    "the provider. The provider says: {}."
)
_CHECK_REFUSED: Final = "The provider says: {}. Ask its admin whether you may use redpoll."


def _check_role(settings: Settings) -> str:
    return (
        f"Ask the provider's admin for the role {settings.oidc_admin_role} or {settings.oidc_viewer_role}, in the "
        f"claim {settings.oidc_role_claim}. An admin of redpoll can change these names: oidc_role_claim, "
        "oidc_admin_role, oidc_viewer_role."
    )
