"""A FastPublish without a control plane, and messages for it. Not a test."""

import hashlib
import hmac
import types

import hiredis

from redpoll._fast_publish import FastApp, FastPublish
from redpoll._http import IncomingRequest, pack_request, read_answers
from redpoll._text import Form
from redpoll.cluster.redis.keys import Keys
from redpoll.http.messages import FIELDS
from redpoll.protocol.apps import App
from redpoll.protocol.messages import limits_of

__all__ = ["NOW_S", "Control", "body", "message"]

KEY, SECRET = "key", b"secret"
NOW_S = 1_700_000_000
ANSWER = (b"T", b"L", b"D")
ANSWERS = (
    (4, Form(b"open D T L {}", ANSWER)),
    (5, Form(b"closes D T L {}", ANSWER)),
    (4, Form(b"keeps D T L {}", ANSWER)),
)
ROW = Form(b'["T","A",U,M,"N",["C"],B,"K","X"],', (b"T", b"A", b"U", b"M", b"N", b"C", b"B", b"K", b"X"))


class Control:
    """A FastPublish whose callbacks note what they get."""

    def __init__(self, **changes):
        self.app = App(id="1", name="one", keys=())
        self.published, self.completed, self.failed = [], [], []
        keys = Keys("rp")
        self.fast = FastPublish(
            {"1": self.app},
            lambda app: FastApp(limits_of(self.app), ((KEY.encode(), SECRET),), 0.0),
            b"",
            keys.publish,
            keys.shards,
            **{
                "clock": lambda: NOW_S,
                "timer": lambda: 0.0,
                "limit": None,
                "caller": lambda app_id, fields: None,
                "dateline": types.SimpleNamespace(line=b"date"),
                "ready": lambda: 0,
                "publish": lambda commands, published: self.published.append((commands.data, published)),
                "soon": lambda finish: None,
                "completed": lambda *given: self.completed.append(given),
                "failed": lambda *given: self.failed.append(given),
                "answers": ANSWERS,
                "row": ROW,
                "max_skew_s": 600,
                "api_prefix": b"/api/v1",
                "is_checked": False,
                **changes,
            },
        )

    def take(self, data):
        return self.fast.take("link", IncomingRequest, bytearray(data), len(data), FIELDS)

    def takes(self, body, target="/apps/1/events"):
        """The commands of a publish; None if it takes the other way."""
        _, _, taken = self.take(message(1, body, target))
        if not taken:
            return None
        reader = hiredis.Reader()
        reader.feed(self.published[-1][0])
        return list(iter(reader.gets, False))

    def answers(self):
        self.fast.finish()
        return [answer for given in self.completed for answer in read_answers(given[1])[0]]


def message(number, body, target="/apps/1/events", *, secret=SECRET, flags=0, client=b"192.0.2.1", change=b""):
    digest = hashlib.md5(body).hexdigest()
    query = f"auth_key={KEY}&auth_timestamp={NOW_S}&auth_version=1.0&body_md5={digest}"
    signature = hmac.new(secret, f"POST\n{target}\n{query}".encode(), hashlib.sha256).hexdigest()
    whole = f"{target}?{query}&auth_signature={signature}".encode()
    return pack_request(number, flags, b"POST", client, whole, b"", body + change)


def body(data=b"{}", *, name=b"e", channels=b'["c"]', more=b""):
    return b'{"name":"%b","channels":%b,"data":"%b"%b}' % (name, channels, data, more)
