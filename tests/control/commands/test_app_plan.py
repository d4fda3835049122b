"""What `redpoll apply` changes in one app."""

import msgspec
import pytest

from redpoll.control.commands.app_plan import AppPlan, Wanted
from redpoll.control.records.tokens import new_token
from redpoll.protocol.apps import App, HistoryRule, Key
from redpoll.store.webhooks import Endpoint

NOW = 1_700_000_000.0
RULE = HistoryRule(id="aaaaaa", name="news-", prefix=True, keep=10, seconds=60, era="e1")
SHOP = App(id="shop", name="Shop", keys=(Key(key="k1", secret="s1"), Key(key="k2", secret="s2")), history=(RULE,))


def endpoint(name: str, **values) -> Endpoint:
    fields = {"app_id": "shop", "url": "https://a.example/", "secret": "w", "events": ("all",), "channels": ()}
    return Endpoint(**{**fields, "id": name, "format": "service", "created_at": 1.0, **values})


def plan(known=SHOP, endpoints=(), tokens=(), prune=False, wanted_tokens=(), **wanted) -> AppPlan:
    fields = {"id": "shop", "name": None, "one_key": True, "keys": [], "settings": {}, "history": []}
    app = msgspec.convert({**fields, "webhooks": [], "tokens": list(wanted_tokens), **wanted}, Wanted)
    return AppPlan(app, known, endpoints, tokens, NOW, prune, lambda webhook: None)


def test_app_that_the_file_only_names_stays_as_it_is():
    made = plan()
    assert (made.app, made.outcome, made.faults) == (SHOP, "unchanged", [])


def test_rule_that_changes_keeps_its_id_and_era_and_a_new_one_gets_its_own():
    rules = [
        {"name": "news-", "prefix": True, "keep": 20, "seconds": 60},
        {"name": "log", "prefix": False, "keep": 5, "seconds": 5},
    ]
    made = plan(history=rules)
    changed, added = made.app.history
    assert (changed.id, changed.era, changed.keep) == ("aaaaaa", "e1", 20)
    assert added.id not in ("", "aaaaaa")
    assert added.era not in ("", "e1")
    assert made.changes == ["history of news-…: changed", "history of log: added"]
    assert plan(known=made.app, history=rules).outcome == "unchanged"


def test_webhooks_with_one_url_are_matched_in_their_order():
    own = (endpoint("w1", channels=("a-",)), endpoint("w2", channels=("b-",)))
    url = "https://a.example/"
    made = plan(endpoints=own, webhooks=[{"url": url, "channels": ["a-"]}, {"url": url, "channels": ["c-"]}])
    assert [(one.id, one.channels) for one in made.changed_endpoints] == [("w2", ("c-",))]
    assert made.added_endpoints == []
    made = plan(endpoints=own, webhooks=[{"url": url, "channels": ["a-"]}], prune=True)
    assert [(one.id, one.secret, one.enabled) for one in made.changed_endpoints] == [("w2", "", False)]


def test_new_secret_of_a_webhook_leaves_the_old_one_valid_for_a_day():
    made = plan(endpoints=(endpoint("w1"),), webhooks=[{"url": "https://a.example/", "secret": "new"}])
    (changed,) = made.changed_endpoints
    assert changed.secrets(NOW + 80_000) == ["new", "w"]
    assert "new" not in "".join(made.changes)


def test_pin_is_set_changed_removed_or_left_as_it_is():
    url, other = "https://a.example/", "cd" * 32
    # As openssl prints it.
    (added,) = plan(webhooks=[{"url": url, "pin": ":".join(["AB"] * 32)}]).added_endpoints
    assert added.pin == "ab" * 32
    for same in ({}, {"pin": added.pin}):
        assert plan(endpoints=(added,), webhooks=[{"url": url, **same}], prune=True).changed_endpoints == []
    for pin in (other, ""):
        made = plan(endpoints=(added,), webhooks=[{"url": url, "pin": pin}])
        assert [one.pin for one in made.changed_endpoints] == [pin]
        assert made.changes == [f"webhook {url}: pin changed"]
        assert made.faults == []


def test_pin_that_no_certificate_has_is_a_fault_at_its_place():
    own = (endpoint("w1", pin="ab" * 32),)
    webhooks = [{"url": "https://a.example/", "pin": "ab"}, {"url": None, "pin": "ab" * 32}, {"url": None, "pin": ""}]
    made = plan(endpoints=own, webhooks=webhooks)
    assert [where for where, _ in made.faults] == ["webhooks[0].pin", "webhooks[1].pin"]
    assert "64 hex digits" in made.faults[0][1]


def test_secret_without_a_key_is_that_of_the_only_key():
    single = msgspec.structs.replace(SHOP, keys=SHOP.keys[:1])
    assert plan(known=single, keys=[{"key": "", "secret": "s9"}]).app.keys == (Key(key="k1", secret="s9"),)
    assert plan(keys=[{"key": "", "secret": "s9"}]).faults[0][0] == "secret"
    assert plan(known=None, keys=[{"key": "", "secret": "s9"}]).app.keys[0].secret == "s9"


def test_hook_mask_is_that_of_the_webhooks_as_they_will_be():
    assert plan(webhooks=[{"url": "https://a.example/", "events": ["member.added"]}]).app.hooks == "m"
    assert plan(webhooks=[{"url": "https://a.example/", "enabled": False}]).app.hooks == ""


def test_token_is_made_again_for_another_date_but_not_for_a_duration():
    ends_at = NOW + 86_400.0
    own, _ = new_token("shop", "ci", ["read"], NOW, ends_at + 0.5)
    for row in ({}, {"expires_at": NOW + 500.0}, {"expires_at": ends_at, "dated": True}):
        made = plan(tokens=[own], wanted_tokens=[{"name": "ci", "scopes": ["read"], **row}])
        assert (made.outcome, made.faults) == ("unchanged", [])
    made = plan(
        tokens=[own], wanted_tokens=[{"name": "ci", "scopes": ["read"], "expires_at": NOW + 500.0, "dated": True}]
    )
    assert (made.changes, made.revoked_tokens) == (["token ci: revoked and made again"], [own])
    assert made.added_tokens[0].expires_at == NOW + 500.0


@pytest.mark.parametrize("scopes", [("all", "publish"), ("publish", "all")])
def test_pruning_leaves_one_token_of_a_name_the_one_that_the_file_describes(scopes):
    own = [new_token("shop", "ci", [scope], NOW - 9 + at, None)[0] for at, scope in enumerate(scopes)]
    wanted = [{"name": "ci", "scopes": ["publish"]}]
    assert plan(tokens=own, wanted_tokens=wanted).outcome == "unchanged"
    bare = msgspec.structs.replace(SHOP, history=())
    made = plan(known=bare, tokens=own, wanted_tokens=wanted, prune=True)
    assert (made.added_tokens, made.revoked_tokens) == ([], [own[scopes.index("all")]])
    assert made.changes == ["token ci: another of this name revoked"]
    wanted = [{"name": "ci", "scopes": ["read"]}]
    assert plan(tokens=own, wanted_tokens=wanted).revoked_tokens == own[1:]
    made = plan(tokens=own, wanted_tokens=wanted, prune=True)
    assert (len(made.added_tokens), made.revoked_tokens) == (1, own[::-1])
