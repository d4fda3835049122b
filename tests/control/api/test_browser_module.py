"""The JavaScript module for pages: a file that any page may load and a browser may cache."""

from importlib import resources


async def test_module_is_served_without_credentials_to_any_origin(plane):
    reply = await plane.ask("GET", "/api/v1/redpoll.js", headers={"Origin": "https://page.example"})
    assert reply.status == 200
    assert reply.body == resources.files("redpoll.control").joinpath("static/redpoll.js").read_bytes()
    assert reply.headers["content-type"] == "text/javascript; charset=utf-8"
    assert reply.headers["access-control-allow-origin"] == "*"
    assert reply.headers["cache-control"] == "public, max-age=3600"


async def test_request_with_the_current_etag_gets_304_on_both_ports(plane, workers_request):
    first = await plane.ask("GET", "/api/v1/redpoll.js")
    tag = first.headers["etag"]
    for known, status in ((tag, 304), (f'"other", W/{tag}', 304), ('"other"', 200)):
        fields = {"If-None-Match": known}
        control = await plane.ask("GET", "/api/v1/redpoll.js", headers=fields)
        public = await workers_request("GET", "/api/v1/redpoll.js", fields=fields)
        for answer in (control, public):
            assert (answer.status, answer.headers["etag"], bool(answer.body)) == (status, tag, status == 200)
