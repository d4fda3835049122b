"""What `redpoll apply` changes in one app: its record beside what the file says (app_apply.py).

Without `prune`, what the file doesn't name stays as it is. With it, other keys are disabled, other rules, webhooks and
tokens removed, and other settings get their defaults.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from redpoll.control.records.checks import RecordError, check_rules
from redpoll.control.records.records import newly_made, rule_pattern, setting_text
from redpoll.control.records.tokens import check_token, new_token
from redpoll.control.webhooks.endpoints import MAX_ENDPOINTS, OVERLAP_S, deleted
from redpoll.control.webhooks.payloads import FORMATS
from redpoll.control.webhooks.wanted import ALL, check_pin, hooks_of, target_of
from redpoll.protocol.apps import SETTINGS, App, HistoryRule, Key, parse_setting, with_eras
from redpoll.protocol.tokens import Token
from redpoll.store.webhooks import Endpoint

__all__ = ["AppPlan", "Wanted", "WantedKey", "WantedToken", "WantedWebhook"]

# What a webhook gets, and how.
_LISTS = ("events", "channels", "client_events")
_VALUES = ("format", "batch")
_WEBHOOK_SECRET = re.compile(r"[!-~]{1,64}").fullmatch


class WantedKey(msgspec.Struct, forbid_unknown_fields=True):
    key: str
    secret: str | None = None
    enabled: bool = True


class WantedWebhook(msgspec.Struct, forbid_unknown_fields=True):
    # None: its deliveries are pulled.
    url: str | None
    events: tuple[str, ...] = (ALL,)
    format: str = FORMATS[0]
    channels: tuple[str, ...] = ()
    client_events: tuple[str, ...] = ()
    batch: bool = False
    secret: str | None = None
    enabled: bool = True
    # The fingerprint of the only accepted certificate. "": any valid one is; None: as it is.
    pin: str | None = None

    @property
    def pinned(self) -> str | None:
        """`pin` as the record has it: tools print fingerprints in capitals, with colons."""
        return None if self.pin is None else self.pin.replace(":", "").lower()


class WantedToken(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    scopes: list[str]
    expires_at: float | None = None
    # The file has a date, and no time from now.
    dated: bool = False


class Wanted(msgspec.Struct, forbid_unknown_fields=True):
    """An app of the file (importing/apps_file.py). `history` has the fields of HistoryRule but `id`."""

    id: str
    name: str | None
    one_key: bool
    keys: list[WantedKey]
    settings: dict[str, str]
    history: list[dict[str, Any]]
    webhooks: list[WantedWebhook]
    tokens: list[WantedToken]


class AppPlan:
    """`app` is the app as it will be. `changes` are sentences for people, without secrets; `made` are secrets that
    nobody knows yet, `{what, name, secret}`. `faults` are `(path below the app, text)`.

    `known` is the app as it is, None for a new one, with its `endpoints` and its valid `tokens`. `url_fault(webhook)`
    says why a webhook's values are refused. With `dry_run`, names that are made at random aren't shown, because they
    will be others. Times are Unix seconds.
    """

    def __init__(
        self,
        wanted: Wanted,
        known: App | None,
        endpoints: Sequence[Endpoint],
        tokens: Sequence[Token],
        now_s: float,
        prune: bool,
        url_fault: Callable[[WantedWebhook], str | None],
        dry_run: bool = False,
    ) -> None:
        self.known = known
        self.changes: list[str] = []
        self.made: list[dict[str, str]] = []
        self.faults: list[tuple[str, str]] = []
        self.added_keys: list[Key] = []
        self.changed_keys: list[Key] = []
        self.added_endpoints: list[Endpoint] = []
        self.changed_endpoints: list[Endpoint] = []
        self.added_tokens: list[Token] = []
        self.revoked_tokens: list[Token] = []
        self._wanted = wanted
        self._now_s = now_s
        self._prune = prune
        self._dry_run = dry_run
        before = known or newly_made(App(id=wanted.id, name=wanted.id, keys=()))
        self.app = msgspec.structs.replace(
            before,
            name=before.name if wanted.name is None else wanted.name,
            keys=self._keys(before.keys),
            history=self._history(before),
            **self._settings(before),
        )
        if known is not None and self.app.name != known.name:
            self.changes.append(f"name: {known.name} → {self.app.name}")
        after = self._webhooks(endpoints, url_fault)
        self.app = msgspec.structs.replace(self.app, hooks=hooks_of(after))
        self._tokens(tokens)

    @property
    def outcome(self) -> str:
        return "created" if self.known is None else "updated" if self.changes else "unchanged"

    def _keys(self, before: tuple[Key, ...]) -> tuple[Key, ...]:
        known = {key.key: key for key in before}
        wanted = self._wanted.keys
        made = ""
        if not wanted and self.known is None:
            made = secrets.token_hex(10)
            wanted = [WantedKey(key=made)]
        elif self._wanted.one_key and wanted and not wanted[0].key:
            # A secret without a key: of the only key, or of one that is made.
            if len(before) > 1:
                self.faults.append(("secret", f"the app has {len(before)} keys: say of which key this is the secret"))
                return before
            made = "" if before else secrets.token_hex(10)
            wanted = [WantedKey(made or before[0].key, wanted[0].secret)]
        for one in wanted:
            own = known.get(one.key)
            if own is None:
                secret = one.secret if one.secret is not None else secrets.token_hex(20)
                known[one.key] = Key(key=one.key, secret=secret, enabled=one.enabled)
                self.added_keys.append(known[one.key])
                if one.secret is None:
                    self._make("secret", one.key, secret)
                is_shown = one.key != made or not self._dry_run
                self.changes.append(f"key {one.key}: added" if is_shown else "a new key: added")
                continue
            after = Key(key=one.key, secret=own.secret if one.secret is None else one.secret, enabled=one.enabled)
            if after != own:
                what = (
                    "another secret"
                    if not _same(after.secret, own.secret)
                    else "enabled"
                    if one.enabled
                    else "disabled"
                )
                self._change_key(known, after, what)
        if self._prune and wanted:
            named = {one.key for one in wanted}
            for other in before:
                if other.key not in named and other.enabled:
                    self._change_key(known, msgspec.structs.replace(other, enabled=False), "disabled")
        if not any(key.enabled for key in known.values()):
            self.faults.append(("keys", "an app needs one enabled key; to close it, set enabled = false"))
        return tuple(known.values())

    def _change_key(self, known: dict[str, Key], key: Key, what: str) -> None:
        known[key.key] = key
        self.changed_keys.append(key)
        self.changes.append(f"key {key.key}: {what}")

    def _make(self, what: str, name: str, secret: str) -> None:
        self.made.append({"what": what, "name": name, "secret": secret})

    def _settings(self, before: App) -> dict[str, Any]:
        values = {}
        for name, text in self._wanted.settings.items():
            try:
                values[name] = parse_setting(name, text)
            except ValueError as error:
                self.faults.append((f"settings.{name}", str(error)))
        if self._prune:
            values = {name: setting.default for name, setting in SETTINGS.items()} | values
        for name, value in values.items():
            old = getattr(before, name)
            if value != old:
                self.changes.append(f"{name}: {setting_text(old)} → {setting_text(value)}")
        return values

    def _history(self, before: App) -> tuple[HistoryRule, ...]:
        rules = {(rule.name, rule.prefix): rule for rule in before.history}
        named = set()
        ids = {rule.id for rule in before.history}
        for number, fields in enumerate(self._wanted.history):
            pattern = (fields["name"], fields["prefix"])
            own = rules.get(pattern)
            rule_id = own.id if own is not None else _new_id(ids)
            rule = HistoryRule(**{**fields, "id": rule_id, "era": own.era if own is not None else ""})
            if pattern in named:
                self.faults.append((f"history[{number}]", f"{rule_pattern(rule)} has a rule already"))
            named.add(pattern)
            try:
                check_rules(before.id, [rule])
            except RecordError as error:
                self.faults.append((f"history[{number}]", str(error)))
            if rule != own:
                self.changes.append(f"history of {rule_pattern(rule)}: {'added' if own is None else 'changed'}")
            rules[pattern] = rule
        if self._prune:
            for pattern in [pattern for pattern in rules if pattern not in named]:
                self.changes.append(f"history of {rule_pattern(rules.pop(pattern))}: removed")
        after = tuple(rules.values())
        if after == before.history or any(where.startswith("history") for where, _ in self.faults):
            return after
        try:
            check_rules(before.id, after)
        except RecordError as error:
            self.faults.append(("history", str(error)))
        return with_eras(before.history, after, secrets.token_hex(4))

    def _webhooks(
        self, before: Sequence[Endpoint], url_fault: Callable[[WantedWebhook], str | None]
    ) -> Iterable[Endpoint]:
        """The app's endpoints as they will be."""
        after = {endpoint.id: endpoint for endpoint in before}
        own = _matched(self._wanted.webhooks, before)
        for number, wanted in enumerate(self._wanted.webhooks):
            fault = url_fault(wanted)
            if fault is not None:
                self.faults.append((f"webhooks[{number}]", fault))
            if wanted.secret is not None and not _WEBHOOK_SECRET(wanted.secret):
                self.faults.append(
                    (f"webhooks[{number}].secret", "a webhook's secret must have 1 to 64 letters and signs")
                )
            same = own.get(number)
            endpoint = self._new_endpoint(wanted) if same is None else self._changed_endpoint(same, wanted)
            after[endpoint.id] = endpoint
            if wanted.pin is not None:
                try:
                    check_pin(endpoint)
                except RecordError as error:
                    self.faults.append((f"webhooks[{number}].pin", str(error)))
        if self._prune:
            named = {endpoint.id for endpoint in own.values()}
            for endpoint in (one for one in before if one.id not in named):
                self.changed_endpoints.append(deleted(endpoint, self._now_s))
                self.changes.append(f"webhook {target_of(endpoint)}: deleted")
                del after[endpoint.id]
        if len(after) > MAX_ENDPOINTS:
            self.faults.append(
                ("webhooks", f"there would be {len(after)} webhooks; an app has at most {MAX_ENDPOINTS}")
            )
        return after.values()

    def _new_endpoint(self, wanted: WantedWebhook) -> Endpoint:
        secret = wanted.secret if wanted.secret is not None else secrets.token_hex(20)
        endpoint = Endpoint(
            id=secrets.token_hex(6),
            app_id=self._wanted.id,
            url=wanted.url or "",
            secret=secret,
            events=tuple(dict.fromkeys(wanted.events)),
            channels=tuple(dict.fromkeys(wanted.channels)),
            client_events=tuple(dict.fromkeys(wanted.client_events)),
            format=wanted.format,
            batch=wanted.batch,
            pin=wanted.pinned or "",
            # Those of one app keep the order of the file.
            created_at=self._now_s + len(self.added_endpoints) / 1_000,
            disabled_at=None if wanted.enabled else self._now_s,
        )
        self.added_endpoints.append(endpoint)
        self.changes.append(f"webhook {target_of(endpoint)}: added")
        if wanted.secret is None:
            self._make("webhook", target_of(endpoint), secret)
        return endpoint

    def _changed_endpoint(self, own: Endpoint, wanted: WantedWebhook) -> Endpoint:
        values: dict[str, Any] = {}
        for name in _LISTS:
            if set(getattr(own, name)) != set(getattr(wanted, name)):
                values[name] = tuple(dict.fromkeys(getattr(wanted, name)))
        for name in _VALUES:
            if getattr(own, name) != getattr(wanted, name):
                values[name] = getattr(wanted, name)
        if own.enabled != wanted.enabled:
            values["disabled_at"] = None if wanted.enabled else self._now_s
        if wanted.secret is not None and not _same(wanted.secret, own.secret):
            values |= {
                "secret": wanted.secret,
                "previous_secret": own.secret,
                "previous_until": self._now_s + OVERLAP_S,
            }
        if wanted.pinned is not None and wanted.pinned != own.pin:
            values["pin"] = wanted.pinned
        if not values:
            return own
        names = {"disabled_at": "enabled", "previous_secret": "", "previous_until": ""}
        shown = ", ".join(filter(None, (names.get(name, name) for name in values)))
        self.changes.append(f"webhook {target_of(own)}: {shown} changed")
        endpoint = msgspec.structs.replace(own, **values)
        self.changed_endpoints.append(endpoint)
        return endpoint

    def _tokens(self, before: Sequence[Token]) -> None:
        """A token's scopes and end can't be changed: one with others is revoked, and made again. A duration in the file
        counts from when the token was made. Several tokens may have one name: the file means the newest one that is as
        it says, else the newest."""
        of_name: dict[str, list[Token]] = {}
        for token in before:
            of_name.setdefault(token.name, []).append(token)
        named = set()
        for number, wanted in enumerate(self._wanted.tokens):
            if wanted.name in named:
                self.faults.append((f"tokens[{number}]", f"the name {wanted.name!r} is here twice"))
            named.add(wanted.name)
            same = of_name.pop(wanted.name, [])
            own = next((token for token in reversed(same) if _fits(wanted, token)), same[-1] if same else None)
            if own is None or not _fits(wanted, own):
                self._make_token(number, wanted, own)
            if self._prune:
                self._revoke((token for token in same if token is not own), "another of this name revoked")
        if self._prune:
            for others in of_name.values():
                self._revoke(others, "revoked")

    def _make_token(self, number: int, wanted: WantedToken, own: Token | None) -> None:
        """`own` is the token of this name that it replaces."""
        lasts_s = None if wanted.expires_at is None else wanted.expires_at - self._now_s
        try:
            check_token(wanted.name, wanted.scopes, lasts_s)
        except RecordError as error:
            self.faults.append((f"tokens[{number}]", str(error)))
            return
        # They keep the order of the file, as the endpoints do.
        made_at = self._now_s + len(self.added_tokens) / 1_000
        token, plain = new_token(self._wanted.id, wanted.name, wanted.scopes, made_at, wanted.expires_at)
        self.added_tokens.append(token)
        self._make("token", wanted.name, plain)
        if own is not None:
            self.revoked_tokens.append(own)
        self.changes.append(f"token {wanted.name}: {'added' if own is None else 'revoked and made again'}")

    def _revoke(self, tokens: Iterable[Token], what: str) -> None:
        for token in tokens:
            self.revoked_tokens.append(token)
            self.changes.append(f"token {token.name}: {what}")


def _fits(wanted: WantedToken, own: Token) -> bool:
    ends_otherwise = wanted.dated and int(own.expires_at or 0) != int(wanted.expires_at or 0)
    return set(own.scopes) == set(wanted.scopes) and not ends_otherwise


def _matched(wanted: Sequence[WantedWebhook], before: Sequence[Endpoint]) -> dict[int, Endpoint]:
    """The endpoints that the file means, by the place of the webhook in the file. Several may have the same URL, or
    none: then a webhook is the one with its secret, or else the one that gets the same, or else the oldest."""
    left: dict[str, list[Endpoint]] = {}
    for endpoint in before:
        left.setdefault(endpoint.url, []).append(endpoint)
    matches: dict[int, Endpoint] = {}
    for is_it in (_has_secret, _gets_the_same, _is_any):
        for number, one in enumerate(wanted):
            same = left.get(one.url or "", [])
            match = None if number in matches else next((own for own in same if is_it(one, own)), None)
            if match is not None:
                matches[number] = match
                same.remove(match)
    return matches


def _has_secret(wanted: WantedWebhook, own: Endpoint) -> bool:
    return wanted.secret is not None and _same(wanted.secret, own.secret)


def _gets_the_same(wanted: WantedWebhook, own: Endpoint) -> bool:
    return all(getattr(own, name) == getattr(wanted, name) for name in _VALUES) and all(
        set(getattr(own, name)) == set(getattr(wanted, name)) for name in _LISTS
    )


def _is_any(_wanted: WantedWebhook, _own: Endpoint) -> bool:
    return True


def _same(secret: str, other: str) -> bool:
    return hmac.compare_digest(secret.encode(), other.encode())


def _new_id(taken: set[str]) -> str:
    while (rule_id := secrets.token_hex(3)) in taken:
        pass
    taken.add(rule_id)
    return rule_id
