"""Flask: `REDPOLL_URL=http://KEY:SECRET@127.0.0.1:6001/apps/ID flask --app flask_app run --port 8000`."""

import json
import os
from pathlib import Path

from flask import Flask, session

from redpoll_client.flask import Realtime
from redpoll_client.rules import Rules

PAGE = Path(__file__).with_name("page.html").read_text()
# Yours is a database.
OWNERS = {7: "anna", 8: "bert"}
rules = Rules()


@rules.channel("private-order-{order_id:int}")
def order(user, order_id):
    return OWNERS.get(order_id) == user


@rules.channel("presence-room-{name}")
def room(user, name):
    return {"name": user.title()}


realtime = Realtime(rules, get_user=lambda: session.get("user"), user_id=str)
app = Flask(__name__)
app.config.update(SECRET_KEY=os.urandom(32), SESSION_COOKIE_SAMESITE="Lax")
app.register_blueprint(realtime.blueprint(), url_prefix="/realtime")


@app.get("/")
def page():
    session["user"] = "anna"
    end = realtime.publisher.endpoint
    settings = {"key": end.key, "host": end.host, "port": end.port, "ssl": end.ssl, "headers": {}}
    return PAGE.replace("SETTINGS", json.dumps(settings))


@app.post("/welcome")
def welcome():
    user = session["user"]
    realtime.publisher.send_to_user(user, "welcome", {"text": f"Welcome, {user}"})
    return ""


@app.post("/orders/<int:order_id>/pay")
def pay(order_id):
    realtime.publisher.trigger(f"private-order-{order_id}", "paid", {"by": session["user"]})
    return ""
