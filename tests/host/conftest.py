"""Fixtures of the tests with a real supervisor."""

import pytest

from helpers.certs import self_signed
from host.supervised import Tree


@pytest.fixture
def tree(tmp_path):
    """A tree without Redis, which the stand-ins don't use."""
    tree = Tree(tmp_path, "redis://127.0.0.1:1")
    yield tree
    tree.close()


@pytest.fixture
def pair(tmp_path):
    """Settings of a TLS port; `tls_cert` and `tls_key` are paths."""
    cert, key = self_signed(tmp_path)
    return {"tls_port": 0, "tls_cert": cert, "tls_key": key}
