"""Namespaces of the kernel, in which a test changes what belongs to the whole machine."""

import subprocess

__all__ = ["may_unshare"]


def may_unshare(*namespaces: str) -> bool:
    """Whether this user may create these namespaces. Root may, and on some kernels everybody."""
    return subprocess.run(["unshare", *namespaces, "true"], capture_output=True, check=False).returncode == 0
