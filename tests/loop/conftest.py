"""The workers of tests/worker."""

from worker.conftest import bench

__all__ = ["bench"]
