"""Detection of the end of the process that started this one."""

import os
import select
import time


def wait_for_end(pid: int) -> None:
    """Return when the parent process `pid` has ended, however it ends."""
    try:
        parent = os.pidfd_open(pid)
        select.select([parent], [], [])
    except ProcessLookupError:
        pass  # it has already exited
    except (AttributeError, OSError):  # no pidfd on this system
        while os.getppid() == pid:
            time.sleep(0.5)
