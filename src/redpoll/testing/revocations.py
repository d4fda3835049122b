"""What an app takes back of a fake server's connections, as worker/hub/revocations.py does it."""

from __future__ import annotations

from redpoll.protocol.access import REVOKED, users_of
from redpoll.protocol.errors import Code
from redpoll.protocol.grants import of_channel, of_grant
from redpoll.testing.hub import Hub
from redpoll.testing.space import Space

__all__ = ["revoke", "unsubscribe"]


def revoke(hub: Hub, space: Space, subject: str, at_s: int) -> int:
    """Revokes grants. Returns how many subscriptions ended."""
    space.current.grants.revoke(subject, at_s)
    ended = 0
    for client in list(space.clients.values()):
        session = client.session
        if session.sign_in_revoked:
            ended += len(session.channels)
            client.shut(Code.OVER_CAPACITY, f"{REVOKED}: connect and sign in again")
            continue
        for channel in session.revoked_channels():
            ended += 1
            hub.perform(client, session.remove(channel))
    return ended


def unsubscribe(hub: Hub, space: Space, channel: str, user: str, socket: str, at_s: int) -> int:
    """Removes a user, or the connection with this socket id, from a channel; "" for the one that isn't meant. Returns
    how many subscriptions ended."""
    grants, ended = space.current.grants, 0
    if user:
        space.removed.put(space.app.id, channel, user, hub.moment())
        grants.revoke(of_channel(channel, user), at_s)
    clients = list(space.clients.values()) if user else [space.clients[socket]] if socket in space.clients else []
    for client in clients:
        session = client.session
        subscription = session.channels.get(channel)
        if user and user not in users_of(session.user_id, subscription):
            continue
        if subscription is not None:
            ended += 1
            if socket and subscription.grant is not None:
                grants.revoke(of_grant(channel, subscription.grant.digest.hex()), at_s)
        hub.perform(client, session.remove(channel, at_s))
    return ended
