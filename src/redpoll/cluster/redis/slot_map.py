"""Reads which masters a Redis Cluster has, and which of them has the slot of each shard.

Two nodes must agree, because one that was cut off from the others still shows its old map. Of several maps, the one of
the node with the highest epoch counts. All known nodes are asked at the same time; those that say that the cluster is
down don't count. A node that is known by several names, such as the URL's and its address, counts once, unless the
ACL forbids CLUSTER MYID.
"""

from __future__ import annotations

import asyncio
import re
from binascii import crc_hqx
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from redpoll.cluster.redis.asking import connection_to
from redpoll.cluster.redis.keys import TAGS
from redpoll.config.redis_url import RedisUrl, with_tls_files

if TYPE_CHECKING:
    from redis.asyncio import Redis

__all__ = ["Address", "SlotMap"]

Address = tuple[str, int]

_ANSWER_WITHIN_S: Final = 1.0
_EPOCH: Final = re.compile(r"cluster_current_epoch:(\d+)")
# crc_hqx with a start of 0 is the CRC16 of Redis.
_SLOT_OF_SHARD: Final = tuple(crc_hqx(tag, 0) % 16384 for tag in TAGS)


class SlotMap:
    """The map of the cluster that `url` names. `nodes` are those that are asked. Keeps a connection to each until
    `close`."""

    def __init__(self, url: RedisUrl, *, answer_within_s: float = _ANSWER_WITHIN_S) -> None:
        self._url = url
        self._answer_within_s = answer_within_s
        self.nodes: set[Address] = set(url.hosts)
        self._clients: dict[Address, Redis] = {}

    async def read(self) -> tuple[Address, ...]:
        """The master of each of the 64 shards. Raises OSError if no two nodes agree."""
        from redis.exceptions import RedisError

        nodes = sorted(self.nodes)
        answers = await asyncio.gather(*(self._ask(node) for node in nodes), return_exceptions=True)
        # By map, and by the id of the node that shows it: the node's epoch. A move or a fail-over raises the epoch of
        # the new master.
        maps: dict[tuple[Address, ...], dict[str, int]] = {}
        # By map: the nodes that those nodes know.
        known_by: dict[tuple[Address, ...], set[Address]] = {}
        # Of each answer, so one that has two names is here twice.
        ids: list[str] = []
        for answer in answers:
            if isinstance(answer, RedisError | OSError | TimeoutError):
                continue
            if isinstance(answer, BaseException):
                raise answer
            masters, epoch, known, node_id = answer
            ids.append(node_id)
            self.nodes |= known
            if masters is not None:
                maps.setdefault(masters, {})[node_id] = epoch
                known_by.setdefault(masters, set()).update(known)
        other_names = len(ids) - len(set(ids))
        needed = min(2, len(nodes) - other_names)
        agreed = [
            (max(epochs.values()), len(epochs), masters) for masters, epochs in maps.items() if len(epochs) >= needed
        ]
        if not agreed:
            raise OSError(f"no two nodes of the cluster at {self._url.place} agree on its masters")
        if needed == 1 and len(self.nodes) > len(nodes):
            # The URL names one node. Now the others are known.
            return await self.read()
        _, _, masters = max(agreed)
        await self._forget_others({*self._url.hosts, *known_by[masters]})
        return masters

    async def _forget_others(self, nodes: set[Address]) -> None:
        """Another cluster with the same password may get the address of a node that this cluster no longer has."""
        gone = [self._clients.pop(node) for node in self._clients.keys() - nodes]
        self.nodes = nodes
        await asyncio.gather(*(client.aclose() for client in gone), return_exceptions=True)

    def url_of(self, address: Address) -> str:
        """The URL of one node, with the same user, password and TLS files."""
        url, (host, port) = self._url, address
        login = ""
        if url.password is not None:
            login = f"{quote(url.username or '', safe='')}:{quote(url.password, safe='')}@"
        text = f"{'rediss' if url.tls else 'redis'}://{login}{f'[{host}]' if ':' in host else host}:{port}"
        return with_tls_files(text, url.ca_file, url.cert_file, url.key_file)

    async def close(self) -> None:
        clients, self._clients = self._clients, {}
        await asyncio.gather(*(client.aclose() for client in clients.values()), return_exceptions=True)

    async def _ask(self, node: Address) -> tuple[tuple[Address, ...] | None, int, set[Address], str]:
        # The masters of the shards, None if the cluster is down for this node; its epoch; all nodes that it knows; its
        # id, or its name if the ACL keeps the id from us.
        client = self._clients.get(node)
        if client is None:
            client = self._clients[node] = connection_to(*node, self._url, self._url.username, self._url.password)
        async with asyncio.timeout(self._answer_within_s):
            pipeline = client.pipeline(transaction=False)
            pipeline.execute_command("CLUSTER", "INFO")
            pipeline.execute_command("CLUSTER", "SLOTS")
            pipeline.execute_command("CLUSTER", "MYID")
            info, ranges, node_id = await pipeline.execute(raise_on_error=False)
        for reply in (info, ranges):
            if isinstance(reply, Exception):
                raise reply
        if isinstance(node_id, Exception):
            node_id = f"{node[0]}:{node[1]}"
        masters: dict[int, Address] = {}
        known: set[Address] = set()
        for first, last, *holders in ranges:
            addresses = [(holder[0] or node[0], int(holder[1])) for holder in holders]
            known |= set(addresses)
            for at, slot in enumerate(_SLOT_OF_SHARD):
                if first <= slot <= last:
                    masters[at] = addresses[0]
        epoch = int(_EPOCH.findall(info)[0])
        if "cluster_state:ok" not in info or len(masters) < len(TAGS):
            return None, epoch, known, node_id
        return tuple(masters[at] for at in range(len(TAGS))), epoch, known, node_id
