"""The reasons of the stores' errors."""

import sqlalchemy as sa

from redpoll.store.errors import StoreUnavailable, reason_of


def test_reason_has_no_statement():
    error = sa.exc.OperationalError("INSERT INTO keys VALUES ('a secret')", {}, Exception("database is locked"))
    assert reason_of(error) == "database is locked"


def test_unavailable_is_an_error_of_sqlalchemy_with_its_own_sentence():
    error = StoreUnavailable("PostgreSQL at db/redpoll can't be reached: no route to host")
    assert isinstance(error, sa.exc.SQLAlchemyError)
    assert reason_of(error) == "PostgreSQL at db/redpoll can't be reached: no route to host"
