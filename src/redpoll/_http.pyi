"""Shapes of ext/redpoll/_http.pyx."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from redpoll.protocol.apps import App

R = TypeVar("R", bound=IncomingRequest)

class Head:
    method: bytes
    target: bytes
    version: tuple[int, int]
    headers: dict[bytes, bytes]
    def __init__(self, method: bytes, target: bytes, version: tuple[int, int], headers: dict[bytes, bytes]) -> None: ...

def parse_head(head: bytes) -> Head: ...
def upgrade_fault(head: Head) -> tuple[int, str] | None: ...

class IncomingRequest:
    @property
    def number(self) -> int: ...
    @property
    def flags(self) -> int: ...
    @property
    def refusal(self) -> int: ...
    @property
    def announced(self) -> int | None: ...
    method: str
    path: str
    query: str
    remote: str
    headers: Mapping[str, str]
    body: bytes
    secure: bool
    link: Any
    route: Any
    parameters: tuple[str, ...]
    app: App
    token: Any
    decoded: Any
    found_params: list[tuple[str, str]] | None
    found_key: str | None
    found_trace_id: str | None
    more_headers: bytes
    caller_known: bool
    sampled: bool
    began: float
    def __init__(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes,
        flags: int = 0,
        announced: int | None = 0,
        refusal: int = 0,
    ) -> None: ...

def pack_simple(
    data: bytes,
    number: int,
    flags: int,
    client: bytes,
    places: Mapping[bytes, int],
    client_of: Callable[[bytes], bytes] | None = None,
) -> tuple[int, bytes, bytes, bytes, int] | None: ...
def pack_rest(beginning: bytes, rest: bytes, number: int) -> bytes: ...
def pack_request(
    number: int,
    flags: int,
    method: bytes,
    client: bytes,
    target: bytes,
    fields: bytes,
    body: bytes,
    announced: int | None = 0,
    refusal: int = 0,
) -> bytes: ...
def pack_answer(number: int, flags: int, response: bytes) -> bytes: ...
def pack_ok(number: int, flags: int, dateline: bytes, headers: bytes, body: bytes) -> bytes: ...
def read_answers(data: bytes) -> tuple[list[tuple[int, int, bytes]], int]: ...
def read_requests(kind: type[R], buffer: bytearray, size: int, names: tuple[str, ...]) -> tuple[list[R], int]: ...
def signed_params(
    method: str,
    path: str,
    query: str,
    body: bytes | None,
    app: App | None,
    hashes_of: Callable[[App | None, str], tuple[Any, Any, bool]],
    now_s: float,
    max_skew_s: int,
    short_path: str | None = None,
) -> tuple[str, bool] | None: ...
