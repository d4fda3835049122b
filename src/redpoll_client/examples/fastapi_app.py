"""FastAPI: `REDPOLL_URL=http://KEY:SECRET@127.0.0.1:6001/apps/ID uvicorn fastapi_app:app`, then open port 8000."""

import json
from pathlib import Path
from typing import Annotated

from fastapi import Depends, FastAPI, Request
from fastapi.responses import HTMLResponse

from redpoll_client import AsyncPublisher
from redpoll_client.fastapi import Realtime
from redpoll_client.rules import Rules

PAGE = Path(__file__).with_name("page.html").read_text()
# Yours is a database.
OWNERS = {7: "anna", 8: "bert"}
rules = Rules()


@rules.channel("private-order-{order_id:int}")
def order(user: str, order_id: int) -> bool:
    return OWNERS.get(order_id) == user


@rules.channel("presence-room-{name}")
async def room(user: str, name: str) -> dict[str, str]:
    return {"name": user.title()}


def current_user(request: Request) -> str | None:
    """Yours verifies a session or a token."""
    return request.cookies.get("user")


realtime = Realtime(rules, get_user=current_user, user_id=str)
app = FastAPI(lifespan=realtime.lifespan)
app.include_router(realtime.router(), prefix="/realtime")
CurrentUser = Annotated[str, Depends(current_user)]
CurrentPublisher = Annotated[AsyncPublisher, Depends(realtime.get_publisher)]


@app.get("/")
def page() -> HTMLResponse:
    end = realtime.publisher.endpoint
    settings = {"key": end.key, "host": end.host, "port": end.port, "ssl": end.ssl, "headers": {}}
    response = HTMLResponse(PAGE.replace("SETTINGS", json.dumps(settings)))
    response.set_cookie("user", "anna", samesite="lax")
    return response


@app.post("/welcome")
async def welcome(user: CurrentUser, publisher: CurrentPublisher) -> None:
    await publisher.send_to_user(user, "welcome", {"text": f"Welcome, {user}"})


@app.post("/orders/{order_id}/pay")
async def pay(order_id: int, user: CurrentUser, publisher: CurrentPublisher) -> None:
    await publisher.trigger(f"private-order-{order_id}", "paid", {"by": user})
