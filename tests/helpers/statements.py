"""The statements of Python files, for tests that read what is imported where."""

import ast
from collections.abc import Iterator

_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


def statements(tree: ast.Module, types: bool = True) -> Iterator[ast.AST]:
    """All statements, however deep. `types`: also those under TYPE_CHECKING.

    `ast.walk` takes many times as long: most of a tree is expressions, which have no statements.
    """
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for block in _BLOCKS:
            if types or block != "body" or not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
                waiting += getattr(node, block, ())
