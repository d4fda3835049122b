"""Answers of a language model, published to a channel: the back end of the example.

    REDPOLL_URL=http://KEY:SECRET@127.0.0.1:6001/apps/ID uvicorn backend:app

It needs fastapi, uvicorn and redpoll-client. `model` stands for yours. The answers are in a SQLite file, ANSWERS
(default: answers.db), so they outlive a page, and this process.
"""

import asyncio
import json
import os
import secrets
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, NamedTuple

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from pydantic import BaseModel, Field

from redpoll_client import AsyncPublisher, RedpollError
from redpoll_client.fastapi import Realtime
from redpoll_client.rules import Rules

SPEECH = (
    "A redpoll is a small finch of the far north. It weighs as much as three sheets of paper, and it spends the winter "
    "where the night lasts twenty hours. It survives because it never travels alone: a flock calls all the time, so "
    "that each bird knows where the others are. 🐦 "
)


async def model(messages: list[dict[str, Any]]) -> AsyncIterator[str]:
    """Yields the answer to a conversation, as a language model does. Replace it."""
    asked = "".join(part.get("text", "") for part in messages[-1]["parts"])
    for word in f"You wrote “{asked}”. {SPEECH * 4}".split(" "):
        await asyncio.sleep(0.05)
        yield f"{word} "


# -- what is stored

database = sqlite3.connect(os.environ.get("ANSWERS", "answers.db"), isolation_level=None)
database.execute(
    "CREATE TABLE IF NOT EXISTS messages (number INTEGER PRIMARY KEY, chat TEXT, id TEXT UNIQUE, role TEXT, text TEXT, "
    "state TEXT)"
)


def store(chat: str, message_id: str, role: str, text: str, state: str) -> None:
    database.execute(
        "INSERT INTO messages (chat, id, role, text, state) VALUES (?, ?, ?, ?, ?) "
        "ON CONFLICT (id) DO UPDATE SET text = excluded.text, state = excluded.state",
        (chat, message_id, role, text, state),
    )


def stored(chat: str) -> list[dict[str, Any]]:
    """A conversation in the AI SDK's form, without the answer under way: that one comes over the channel."""
    rows = database.execute("SELECT id, role, text, state FROM messages WHERE chat = ? ORDER BY number", (chat,))
    return [
        {"id": message_id, "role": role, "parts": [{"type": "text", "text": text}], "metadata": {"state": state}}
        for message_id, role, text, state in rows
        if state != "streaming"
    ]


# -- answers

rules = Rules()


@rules.channel("private-chat-{name}")
def chat_channel(user: str, name: str) -> bool:
    """Yours asks whether this user may read this chat."""
    return bool(user)


@rules.channel("presence-chat-{name}")
def devices(user: str, name: str) -> dict[str, str]:
    return {"name": "a device"}


def current_user(request: Request) -> str:
    """Yours verifies a session. Here each page is a user, so that presence counts pages."""
    return request.headers.get("X-Page", "")


realtime = Realtime(rules, get_user=current_user, user_id=str)


class Running(NamedTuple):
    """An answer under way."""

    task: asyncio.Task[None]
    stream: str
    parts: list[str]


running: dict[str, Running] = {}


def channel_of(chat: str) -> str:
    return f"private-chat-{chat}"


async def answer(
    publisher: AsyncPublisher, chat: str, stream: str, messages: list[dict[str, Any]], parts: list[str]
) -> None:
    """Publishes an answer. It is stored before its end is published, so a page that comes after the end finds it."""

    async def saved() -> AsyncIterator[str]:
        try:
            async for part in model(messages):
                parts.append(part)
                yield part
        except Exception:
            store(chat, stream, "assistant", "".join(parts), "failed")
            raise
        store(chat, stream, "assistant", "".join(parts), "done")

    try:
        await publisher.publish_stream(channel_of(chat), "answer", saved(), stream_id=stream)
    except Exception as error:
        # The model failed, or the server can't be reached.
        print(f"{stream} failed: {error!r}", flush=True)
        store(chat, stream, "assistant", "".join(parts), "failed")
    finally:
        running.pop(chat, None)


def end(chat: str) -> asyncio.Task[None]:
    """Stops the answer under way. publish_stream tells the pages."""
    task, stream, parts = running[chat]
    store(chat, stream, "assistant", "".join(parts), "cancelled")
    task.cancel()
    return task


async def mark_unfinished(publisher: AsyncPublisher) -> None:
    """Answers of a process that was killed: what was published is kept, and marked as failed."""
    rows = database.execute("SELECT chat, id FROM messages WHERE state = 'streaming'").fetchall()
    for chat, stream in rows:
        deltas: list[str] = []
        cursor = None
        while True:
            # From the beginning: without `since`, pages go from the newest one back.
            page = await publisher.history(channel_of(chat), limit=1000, since=0, cursor=cursor)
            parts = [json.loads(message.data) for message in page.messages if message.event == "answer"]
            deltas += [part.get("delta", "") for part in parts if part["stream"] == stream]
            cursor = page.next
            if cursor is None:
                break
        store(chat, stream, "assistant", "".join(deltas), "failed")
        await publisher.trigger(channel_of(chat), "answer", {"stream": stream, "state": "failed"})


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with realtime.lifespan(app):
        try:
            await mark_unfinished(realtime.publisher)
        except RedpollError as error:
            print(f"unfinished answers are marked at the next start: {error}", flush=True)
        yield
        await asyncio.gather(*[end(chat) for chat in list(running)], return_exceptions=True)


# -- requests

app = FastAPI(lifespan=lifespan)
app.include_router(realtime.router(), prefix="/api/realtime")


class Asked(BaseModel):
    """What RedpollChatTransport posts."""

    id: str = Field(pattern="^[A-Za-z0-9_-]{1,64}$")
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=1000)


@app.post("/api/chat")
async def chat(asked: Asked, publisher: Annotated[AsyncPublisher, Depends(realtime.get_publisher)]) -> dict[str, str]:
    if asked.id in running:
        raise HTTPException(409, "An answer is under way.")
    question, stream = asked.messages[-1], f"answer-{secrets.token_hex(8)}"
    text = "".join(part.get("text", "") for part in question.get("parts", ()))
    store(asked.id, str(question.get("id", "")), "user", text, "done")
    store(asked.id, stream, "assistant", "", "streaming")
    parts: list[str] = []
    task = asyncio.create_task(answer(publisher, asked.id, stream, asked.messages, parts))
    running[asked.id] = Running(task, stream, parts)
    return {"stream": stream}


@app.post("/api/chats/{chat_id}/stop")
async def stop(chat_id: str) -> Response:
    if chat_id in running:
        end(chat_id)
    return Response(status_code=204)


@app.get("/api/chats/{chat_id}")
async def messages(chat_id: str) -> list[dict[str, Any]]:
    return stored(chat_id)


@app.get("/api/settings")
async def settings() -> dict[str, Any]:
    """What a page needs to connect."""
    end = realtime.publisher.endpoint
    return {"key": end.key, "host": end.host, "port": end.port, "ssl": end.ssl}
