"""The table of all routes: path, handler, access, and the description in the OpenAPI document.

The front, the metrics and the OpenAPI document read this table. Most handlers are in api.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from redpoll.control.api.api import Api
from redpoll.control.api.browser_module import BrowserModule
from redpoll.control.api.grants import GrantRequests
from redpoll.control.api.history import ChannelHistory
from redpoll.control.api.history_query import HISTORY_QUERY
from redpoll.control.api.openapi import Document
from redpoll.control.api.pulls import Acknowledgement, PullRequests
from redpoll.control.api.streams import allow_stream
from redpoll.control.http.router import API_PREFIX, About, Access, Place, Route, Routes
from redpoll.control.http.schemas import (
    AcknowledgedResponse,
    AuthResponse,
    BatchResponse,
    ChannelResponse,
    ChannelsResponse,
    ClearedResponse,
    Empty,
    EventsResponse,
    HistoryResponse,
    Messages,
    PulledResponse,
    RevokedResponse,
    TraceResponse,
    TriggerResponse,
    UnsubscribedResponse,
    UsageResponse,
    UsersResponse,
    VerifyResponse,
)
from redpoll.control.observe.cluster_usage import ClusterUsage
from redpoll.control.observe.health import Health
from redpoll.control.observe.metrics import Metrics
from redpoll.control.tracing.eventlog import LOG_QUERY, EventTrace
from redpoll.control.webhooks.verify import Verify, Webhook

# The shapes of unchecked request bodies, for the OpenAPI document only; other code uses the checked ones.
from redpoll.protocol.messages import Auth, Batch, Revoke, Trigger, Unsubscribe

__all__ = ["routes_of"]

_EVENT_FAULTS: Final = (
    "invalid_event_name",
    "invalid_channel",
    "invalid_socket_id",
    "invalid_info",
    "idempotency_conflict",
    "no_history",
    "channel_ended",
    "too_many_histories",
    "daily_limit_exceeded",
)
_TERMINATE: Final = About("Close all connections of a signed-in user.", Empty, body=Empty)


def routes_of(
    api: Api,
    history: ChannelHistory,
    event_trace: EventTrace,
    browser_module: BrowserModule,
    usage: ClusterUsage,
    verify: Verify,
    grants: GrantRequests,
    pulls: PullRequests,
    health: Health,
    metrics: Metrics,
    pages: Sequence[Route] = (),
) -> Routes:
    """All routes. `pages` are those of the rooms below, the management API's and the dashboard's. The OpenAPI document
    is made of the table and served by it."""
    document = Document()
    channels = "/apps/{app_id}/channels"
    terminate = "/users/{user_id}/terminate_connections"
    routes = Routes(
        [
            Route(
                "POST",
                "/apps/{app_id}/events",
                "events",
                api.trigger,
                scope="publish",
                limited=True,
                about=About(
                    "Publish an event to one or more channels.",
                    TriggerResponse,
                    body=Trigger,
                    faults=("too_many_channels", *_EVENT_FAULTS),
                ),
            ),
            Route(
                "POST",
                "/apps/{app_id}/batch_events",
                "batch_events",
                api.trigger_batch,
                scope="publish",
                limited=True,
                about=About(
                    "Publish several events: all of them, or none if one is invalid.",
                    BatchResponse,
                    body=Batch,
                    faults=("batch_too_large", *_EVENT_FAULTS),
                ),
            ),
            Route(
                "GET",
                channels,
                "channels",
                api.list_channels,
                scope="read",
                about=About(
                    "List the occupied channels.",
                    ChannelsResponse,
                    query=("filter_by_prefix", "info", "channels_limit", "channels_cursor"),
                    faults=("invalid_info", "invalid_cursor"),
                ),
            ),
            Route(
                "GET",
                channels + "/{channel}",
                "channel",
                api.show_channel,
                scope="read",
                about=About(
                    "Show whether a channel is occupied, its counts, and its cached event.",
                    ChannelResponse,
                    query=("channel_info",),
                    faults=("invalid_channel", "invalid_info", "not_presence_channel"),
                ),
            ),
            Route(
                "GET",
                channels + "/{channel}/users",
                "users",
                api.list_users,
                scope="read",
                about=About(
                    "List the users of a presence channel.",
                    UsersResponse,
                    faults=("invalid_channel", "not_presence_channel"),
                ),
            ),
            Route(
                "GET",
                channels + "/{channel}/history",
                "history",
                history.show,
                scope="read",
                about=About(
                    "List the stored messages of a channel; by default the newest.",
                    HistoryResponse,
                    query=HISTORY_QUERY,
                    faults=("invalid_channel", "invalid_cursor", "invalid_offset", "unknown_epoch"),
                ),
            ),
            Route(
                "DELETE",
                channels + "/{channel}/history",
                "clear_history",
                history.forget,
                scope="publish",
                about=About(
                    "Delete the stored messages of a channel; its history continues with a new epoch.",
                    ClearedResponse,
                    faults=("invalid_channel",),
                ),
            ),
            Route(
                "POST",
                channels + "/{channel}/unsubscribe",
                "unsubscribe",
                grants.unsubscribe,
                scope="publish",
                about=About(
                    "Remove a user, or one connection, from a private or presence channel; the connections stay.",
                    UnsubscribedResponse,
                    body=Unsubscribe,
                    faults=("invalid_channel", "invalid_socket_id"),
                ),
            ),
            Route(
                "POST",
                "/apps/{app_id}/grants/revoke",
                "revoke_grants",
                grants.revoke,
                scope="publish",
                about=About(
                    "Revoke a signed channel grant, or all grants of a user, and end what they opened.",
                    RevokedResponse,
                    body=Revoke,
                ),
            ),
            Route(
                "GET",
                channels + "/{channel}/stream",
                "stream",
                allow_stream,
                scope="read",
                cross_origin=True,
                takes_grants=True,
                about=About(
                    "Read a channel with history: what is stored, and what comes, by the Durable Streams protocol 1.0 "
                    "or as server-sent events. A grant that opens the channel is accepted as bearer token.",
                    Messages,
                    query=("stream_offset", "stream_live", "stream_cursor", "stream_only", "stream_token"),
                    faults=("bad_request", "invalid_channel", "no_history", "offset_gone", "too_many_connections"),
                    streamed=True,
                    empty=(
                        (204, "No message came while a long poll waited, or the channel has ended."),
                        (304, "Nothing changed since the answer whose `ETag` was sent as `If-None-Match`."),
                    ),
                ),
            ),
            Route(
                "OPTIONS",
                channels + "/{channel}/stream",
                "stream_preflight",
                api.preflight_read,
                Access.OPEN,
                cross_origin=True,
                about=About("Preflight of browsers (CORS).", None, success=204),
            ),
            Route(
                "GET",
                "/apps/{app_id}/events/log",
                "events_log",
                event_trace.search,
                scope="read",
                about=About(
                    "List publish requests, newest first, including refused ones.",
                    EventsResponse,
                    query=LOG_QUERY,
                    faults=("bad_request", "invalid_cursor"),
                ),
            ),
            Route(
                "GET",
                "/apps/{app_id}/trace/{trace_id}",
                "trace",
                event_trace.show,
                scope="read",
                about=About(
                    "Show one publish request: when it was accepted, which workers received it, and to how many "
                    "sockets it was written.",
                    TraceResponse,
                    query=("trace_time_us",),
                    faults=("bad_request", "not_found"),
                ),
            ),
            Route(
                "GET",
                "/apps/{app_id}/usage",
                "usage",
                usage.show,
                scope="read",
                about=About(
                    "List what the app used by day on all nodes: the most connections at a time, and messages.",
                    UsageResponse,
                    query=("usage_days",),
                    faults=("bad_request",),
                ),
            ),
            Route(
                "POST",
                "/apps/{app_id}" + terminate,
                "terminate_connections",
                api.terminate,
                scope="publish",
                about=_TERMINATE,
            ),
            Route(
                "POST",
                terminate,
                "terminate_connections_of_key",
                api.terminate,
                Access.ANY_APP,
                scope="publish",
                about=_TERMINATE,
            ),
            Route(
                "POST",
                "/apps/{app_id}/auth",
                "auth",
                api.authorize,
                scope="auth",
                cross_origin=True,
                about=About(
                    "Sign a subscription to a private, presence or encrypted channel.",
                    AuthResponse,
                    body=Auth,
                    form=True,
                    faults=("invalid_channel", "invalid_socket_id"),
                ),
            ),
            Route(
                "POST",
                "/apps/{app_id}/webhooks/verify",
                "webhooks_verify",
                verify.verify,
                scope="read",
                about=About(
                    "Check whether a received webhook is signed with the secret of one of the app's endpoints.",
                    VerifyResponse,
                    body=Webhook,
                ),
            ),
            Route(
                "GET",
                "/apps/{app_id}/webhooks/stream",
                "pull_webhooks",
                pulls.stream,
                scope="webhooks",
                about=About(
                    "Hand out webhook deliveries of endpoints without a URL: those that are due, or that come while "
                    "the request waits. With `Accept: text/event-stream`: a stream of events `delivery`, each with one "
                    "delivery as its data.",
                    PulledResponse,
                    query=("pull_endpoint", "pull_limit", "pull_wait"),
                    faults=("bad_request", "not_found", "too_many_connections"),
                    streamed=True,
                ),
            ),
            Route(
                "POST",
                "/apps/{app_id}/webhooks/ack",
                "acknowledge_webhooks",
                pulls.acknowledge,
                scope="webhooks",
                about=About(
                    "Acknowledge deliveries that were handed out, so that they don't come again.",
                    AcknowledgedResponse,
                    body=Acknowledgement,
                ),
            ),
            Route(
                "OPTIONS",
                "/apps/{app_id}/auth",
                "auth_preflight",
                api.preflight,
                Access.OPEN,
                cross_origin=True,
                about=About("Preflight of browsers (CORS).", None, success=204),
            ),
            Route("GET", API_PREFIX + "/redpoll.js", "browser_module", browser_module.show, Access.OPEN),
            Route("GET", API_PREFIX + "/openapi.json", "openapi", document.show, Access.OPEN),
            Route("GET", "/healthz", "healthz", health.live, Access.OPEN),
            Route("GET", "/readyz", "readyz", health.ready, Access.OPEN),
            Route("GET", "/", "root", health.root, Access.OPEN),
            *pages,
            Route("GET", "/metrics", "metrics", metrics.metrics, Access.OPEN, Place.CONTROL),
        ]
    )
    document.describe(routes)
    return routes
