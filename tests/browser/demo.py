"""`redpoll demo` in a process of its own, for tests. Not a test."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from helpers.server import Process, processes


class Demo(NamedTuple):
    process: subprocess.Popen[str]
    url: str
    said: str
    folder: Path

    def family(self) -> list[Process]:
        """The processes that the demo started, and their descendants."""
        running = list(processes())
        found = [process for process in running if process.parent == self.process.pid]
        for process in found:  # the list grows during the loop
            found += [other for other in running if other.parent == process.pid]
        return found


@contextmanager
def running_demo(*words: str) -> Iterator[Demo]:
    """Starts it, with its temporary files in a folder of their own, and waits for its last line."""
    with tempfile.TemporaryDirectory(prefix="rp") as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "redpoll", "demo", *words],
            stdout=subprocess.PIPE,
            text=True,
            # Its Ctrl-C isn't ours.
            start_new_session=True,
            env={"PATH": os.environ["PATH"], "HOME": folder, "TMPDIR": folder},
        )
        try:
            assert process.stdout is not None
            said = ""
            while "Ctrl-C" not in said:
                line = process.stdout.readline()
                assert line, f"the demo ended: {said}"
                said += line
            found = re.search(r"page +(\S+)", said)
            assert found is not None
            yield Demo(process, found[1], said, Path(folder))
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            process.wait(60)
            assert process.stdout is not None
            process.stdout.close()
