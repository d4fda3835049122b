"""Django: routes of auth, sign-in and webhooks, and events that are published if and only if a transaction commits.

    INSTALLED_APPS += ["redpoll_client.django"]
    REDPOLL = {"url": "http://KEY:SECRET@127.0.0.1:6001/apps/ID", "rules": "shop.realtime.rules", "idempotency": True}
    urlpatterns += [path("realtime/", include("redpoll_client.django.urls"))]

`REDPOLL` may have: `url` (else REDPOLL_URL or PUSHER_URL), `rules` (the dotted name of a `Rules`), `user_id` (of a
function that returns a user's id; by default the primary key), `endpoint_secret` (of webhooks), and the other arguments
of `Publisher`.
"""
