"""The page of dashboard users: create and remove users, set roles, reset passwords."""

from __future__ import annotations

from redpoll.control.accounts.accounts import AccountError, Accounts
from redpoll.control.dashboard.access import HOME, AccessControl, Visit
from redpoll.control.dashboard.forms import Form
from redpoll.control.http.response import Response
from redpoll.control.http.router import Route

__all__ = ["UserPages"]


class UserPages:
    def __init__(self, access: AccessControl, accounts: Accounts) -> None:
        self._access = access
        self._accounts = accounts

    def routes(self) -> list[Route]:
        access = self._access
        return [
            access.route("GET", "/users", "users", self.show),
            access.route("POST", "/users", "create_user", self.create, "admin"),
            access.route("POST", "/users/reset", "reset_user", self.reset, "admin"),
            access.route("POST", "/users/role", "set_role", self.set_role, "admin"),
            access.route("POST", "/users/remove", "remove_user", self.remove, "admin"),
        ]

    async def show(self, visit: Visit) -> Response:
        """GET /dashboard/users."""
        return await self._page(visit, Form())

    async def _page(
        self, visit: Visit, form: Form, *, status: int = 200, new_password: tuple[str, str] | None = None
    ) -> Response:
        return visit.page(
            "users.html", status=status, users=await self._accounts.users(), form=form, new_password=new_password
        )

    async def create(self, visit: Visit) -> Response:
        """POST /dashboard/users: name, role. Shows the one-time password once."""
        form = visit.form
        name, role = form.text("name"), form.text("role")
        try:
            password = await self._accounts.create(name, role, by=visit.actor)
        except AccountError as error:
            form.fault(error.field, str(error))
            return await self._page(visit, form, status=422)
        return await self._page(visit, Form(), new_password=(name, password))

    async def reset(self, visit: Visit) -> Response:
        """POST /dashboard/users/reset: user."""
        form = visit.form
        name = form.text("user")
        if name == visit.session.user.name:
            return visit.redirect(f"{HOME}/account")
        try:
            password = await self._accounts.reset(name, by=visit.actor)
        except AccountError as error:
            form.fault("", str(error))
            return await self._page(visit, form, status=422)
        return await self._page(visit, Form(), new_password=(name, password))

    async def set_role(self, visit: Visit) -> Response:
        """POST /dashboard/users/role: user, role."""
        form = visit.form
        name, role = form.text("user"), form.text("role")
        try:
            await self._accounts.set_role(name, role, by=visit.actor)
        except AccountError as error:
            form.fault("", str(error))
            return await self._page(visit, form, status=422)
        return visit.redirect(f"{HOME}/users", f"{name} now has the role {role}.")

    async def remove(self, visit: Visit) -> Response:
        """POST /dashboard/users/remove: user."""
        form = visit.form
        name = form.text("user")
        try:
            await self._accounts.remove(name, by=visit.actor)
        except AccountError as error:
            form.fault("", str(error))
            return await self._page(visit, form, status=422)
        return visit.redirect(f"{HOME}/users", f"User {name} was removed.")
