"""Shapes of ext/redpoll/_text.pyx."""

class Form:
    def __init__(self, text: bytes, marks: tuple[bytes, ...]) -> None: ...
