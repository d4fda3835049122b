"""The page of users."""

import re


async def test_user_is_created_reset_and_removed(plane, browser, open_browser):
    reply = await browser.post("/dashboard/users", name="vera", role="viewer")
    one_time = re.search(r'id="one-time-password">([^<]+)<', reply.body.decode())[1]
    assert one_time not in (await browser.get("/dashboard/users")).body.decode()
    vera = await open_browser()
    assert (await vera.post("/dashboard/login", name="vera", password=one_time)).status == 303
    reply = await browser.post("/dashboard/users/reset", user="vera")
    assert (await vera.get("/dashboard/account")).status == 303
    second = re.search(r'id="one-time-password">([^<]+)<', reply.body.decode())[1]
    assert second != one_time
    assert (await browser.post("/dashboard/users/role", user="vera", role="admin")).status == 303
    assert (await plane.plane.dashboard.accounts.user("vera")).role == "admin"
    assert (await browser.post("/dashboard/users/remove", user="vera")).status == 303
    assert [user.name for user in await plane.plane.dashboard.accounts.users()] == ["admin"]
    noted = (await browser.get("/dashboard/audit")).body.decode()
    for action in ("user create", "user reset", "user role", "user remove"):
        assert action in noted
    assert second not in noted


async def test_faults_are_reported_at_their_field(browser):
    reply = await browser.post("/dashboard/users", name="<script>", role="king")
    assert reply.status == 422
    assert b'id="fault-name"' in reply.body
    assert b'value="&lt;script&gt;"' in reply.body
    assert (await browser.post("/dashboard/users/remove", user="admin")).status == 422
    assert (await browser.post("/dashboard/users/role", user="nobody", role="admin")).status == 422
