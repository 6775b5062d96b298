"""Logging of text that environments print in their processes."""

import logging
import time
from typing import IO

logger = logging.getLogger(__name__)
MAX_LINES_A_MINUTE = 100
MAX_LINE_CHARS = 500


def log_output(output: IO[bytes]) -> None:
    """Log the output of environments until it ends, at most `MAX_LINES_A_MINUTE` lines a minute."""
    minute, num_lines = 0.0, 0
    with output:
        while line := output.readline(1 << 16):
            if time.monotonic() - minute > 60.0:
                if num_lines > MAX_LINES_A_MINUTE:
                    logger.info("environments printed %d more lines within a minute; not logged", num_lines - MAX_LINES_A_MINUTE)
                minute, num_lines = time.monotonic(), 0
            num_lines += 1
            if num_lines <= MAX_LINES_A_MINUTE:
                logger.info("environment: %s", line.decode("utf-8", "replace").rstrip("\n")[:MAX_LINE_CHARS])
