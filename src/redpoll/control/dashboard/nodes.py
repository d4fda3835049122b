"""The page of the nodes: the servers that share Redis and the record store."""

from __future__ import annotations

from redpoll.control.dashboard.access import AccessControl, Visit
from redpoll.control.http.response import Response
from redpoll.control.http.router import Route
from redpoll.control.nodes.nodes import NodeList

__all__ = ["NodePages"]


class NodePages:
    def __init__(self, access: AccessControl, nodes: NodeList) -> None:
        self._access = access
        self._nodes = nodes

    def routes(self) -> list[Route]:
        return [self._access.route("GET", "/nodes", "nodes", self.show)]

    async def show(self, visit: Visit) -> Response:
        """GET /dashboard/nodes."""
        return visit.page("nodes.html", nodes=await self._nodes.rows())
