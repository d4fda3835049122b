"""Data folders of the embedded Redis, as far as `embedded.find_binary` reads them."""

from pathlib import Path

__all__ = ["REDIS_7", "REDIS_8", "written"]

# How the files of these programs begin.
REDIS_7 = b"REDIS0010\xfa\x09redis-ver\x067.0.15\xfa\x0aredis-bits\xc0\x40"
REDIS_8 = b"REDIS0012\xfa\x09redis-ver\x058.0.2\xfa\x0aredis-bits\xc0\x40"


def written(folder: Path, head: bytes) -> Path:
    """Makes the folder, with a file that begins so."""
    files = folder / "appendonlydir"
    files.mkdir(parents=True)
    (files / "appendonly.aof.manifest").write_text(
        "file appendonly.aof.2.base.rdb seq 2 type b\nfile appendonly.aof.2.incr.aof seq 2 type i\n"
    )
    (files / "appendonly.aof.2.base.rdb").write_bytes(head)
    return folder
