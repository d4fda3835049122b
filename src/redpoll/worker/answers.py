"""What a worker answers over `sys`: a table of the kinds of questions (cluster/questions.py) and who answers each."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from redpoll.cluster.questions import (
    CloseSocket,
    Count,
    KnowDirectory,
    ListConnections,
    Move,
    RevokeGrants,
    SilenceOfUser,
    TerminateUser,
    Unsubscribe,
    UserSilent,
)
from redpoll.worker.connection_list import page_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from redpoll.cluster.directory import Directory
    from redpoll.cluster.lifecycle import Life
    from redpoll.cluster.survey import Answerers
    from redpoll.worker.hub.hub import Hub
    from redpoll.worker.hub.revocations import Revocations
    from redpoll.worker.timers.drain import Drain

__all__ = ["answer_questions"]

_MOVED: Final = "another server has more room; connect again"


def answer_questions(
    answerers: Answerers,
    hub: Hub,
    directory: Directory,
    revocations: Revocations,
    life: Life,
    drain: Drain,
    w: Callable[[], str],
    readers: Callable[[str, str], int],
) -> None:
    """Fills the worker's table. `w()` is its name in Redis; `readers` is Streams.count."""

    async def list_connections(question: ListConnections) -> dict[str, Any]:
        page = await page_of(hub.open_connections.each(), question)
        return {**page, "readers": readers(question.app, question.channel)}

    def move(question: Move) -> int:
        target = question.targets.get(w(), 0)
        if target and life.admits:
            drain.begin(_MOVED, question.within_s, target=target, max_per_s=math.inf)
        return target

    answerers.answer(Count, lambda question: len(hub.open_connections))
    answerers.answer(Move, move)
    answerers.answer(TerminateUser, lambda question: hub.users.terminate(question.app, question.user))
    answerers.answer(CloseSocket, lambda question: hub.close_socket(question.app, question.socket))
    answerers.answer_later(KnowDirectory, lambda question: directory.reached(question.version))
    answerers.answer_later(ListConnections, list_connections)
    answerers.answer_later(RevokeGrants, revocations.revoke)
    answerers.answer_later(Unsubscribe, revocations.unsubscribe)
    answerers.hear(SilenceOfUser, hub.user_resume.asked)
    answerers.hear(UserSilent, hub.user_resume.answered)
