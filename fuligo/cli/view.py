"""`fuligo view`: runs in a browser, live or finished, or a report in one file."""

import argparse
import contextlib
import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

from fuligo.errors import ConfigError

DEFAULT_PORT = 6780
BACKLOG = 128
TOKEN_VARIABLE = "FULIGO_VIEW_TOKEN"
"""Environment variable with the token. Other users of the machine can read command lines, but not environments."""
_DESCRIPTION = "Show curves, samples, step time and health of runs, live or finished, on a local page."


def main(arguments: Sequence[str]) -> int:
    """Serve until Ctrl-C, or write the report."""
    options = parser().parse_args(arguments)
    from fuligo.observability.viewer.run import RunReader
    from fuligo.observability.viewer.run_files import find_runs, run_names

    paths = find_runs(options.runs)
    runs = [RunReader(path, name) for path, name in zip(paths, run_names(paths), strict=True)]
    if options.export is not None:
        from fuligo.observability.viewer.report import write_report

        num_bytes = write_report(runs, options.export)
        print(f"wrote {options.export} ({num_bytes / 2**20:.1f} MiB)")
        return 0
    listener = bind(options.host, options.port)
    from fuligo.observability.viewer.api import address, serve

    token = options.token or os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(18)
    print(
        f"{len(runs)} run{'s' * (len(runs) > 1)} at {address(options.host, listener.getsockname()[1], token)}  (Ctrl-C stops it)",
        flush=True,
    )
    with contextlib.suppress(KeyboardInterrupt):
        serve(runs, listener, token)
    return 0


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command's options."""
    parser = argparse.ArgumentParser("fuligo view", description=_DESCRIPTION)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directory, or a directory of run directories")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, help=f"port to listen on; 0 takes a free one (default: {DEFAULT_PORT}, or a free one if it is taken)"
    )
    parser.add_argument("--token", help=f"token that requests must carry (default: the environment variable {TOKEN_VARIABLE}, or random)")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write the report to this file instead of serving")
    return parser


def bind(host: str, port: int | None) -> socket.socket:
    """Return a listening socket; without a port, on the default port or a free one if that is taken.

    Raises ConfigError if the port is taken, or there is no such address.
    """
    family, number = socket.AF_INET6 if ":" in host else socket.AF_INET, DEFAULT_PORT if port is None else port
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        # It listens at once, so that early visitors wait instead of being refused.
        return socket.create_server((host, number), family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except (OSError, OverflowError) as error:
        if port is None and isinstance(error, OSError):
            return bind(host, 0)
        given = f"--host {host}" + ("" if port is None else f" --port {port}")
        raise ConfigError(f"cannot listen on {given}: {error}; use another address, or --port 0 for a free port") from error
