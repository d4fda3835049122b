"""The record store works without SQLAlchemy's ORM."""

import subprocess
import sys

PROGRAM = """
import asyncio, sys
from pathlib import Path
from redpoll.store.without_orm import leave_out_orm
{before}
leave_out_orm()
from redpoll.store.store import Store, database_url

async def use():
    store = await Store.open(database_url(Path(sys.argv[1])))
    async with store.reading() as connection:
        print((await connection.exec_driver_sql("SELECT count(*) FROM apps")).scalar_one())
    await store.close()

asyncio.run(use())
print("sqlalchemy.orm" in sys.modules, sys.modules["sqlalchemy.ext.asyncio"].AsyncSession)
"""


def printed(folder, before=""):
    program = [sys.executable, "-c", PROGRAM.format(before=before), str(folder)]
    return subprocess.run(program, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_store_opens_and_reads_and_the_orm_is_not_imported(tmp_path):
    # Written by a process that migrates: alembic needs no ORM either.
    assert printed(tmp_path) == ["0", "False None"]
    assert printed(tmp_path) == ["0", "False None"]


def test_a_process_that_has_imported_the_orm_keeps_it(tmp_path):
    count, rest = printed(tmp_path, "import sqlalchemy.ext.asyncio")
    assert (count, rest) == ("0", "True <class 'sqlalchemy.ext.asyncio.session.AsyncSession'>")
