"""`fuligo view`: a page over run directories, live or finished; or a report in one file."""

from __future__ import annotations

import argparse
import contextlib
import socket
from collections.abc import Sequence
from pathlib import Path

from fuligo.errors import ConfigError

DEFAULT_PORT = 6780
BACKLOG = 128
_DESCRIPTION = "See what the model did, and why the step took that long: a local page over run directories, live or finished."


def main(arguments: Sequence[str]) -> int:
    """Serve until Ctrl-C, or write the report.

    Raises:
        ConfigError: a path is no run, the address is taken, or the report cannot be written.
    """
    options = parser().parse_args(arguments)
    from fuligo.observability.viewer.find_runs import find_runs, run_names
    from fuligo.observability.viewer.run import RunReader

    paths = find_runs(options.runs)
    runs = [RunReader(path, name) for path, name in zip(paths, run_names(paths), strict=True)]
    if options.export is not None:
        from fuligo.observability.viewer.report import write_report

        num_bytes = write_report(runs, options.export)
        print(f"wrote {options.export} ({num_bytes / 2**20:.1f} MiB)")
        return 0
    listener = bind(options.host, options.port)
    from fuligo.observability.viewer.server import address, serve, token_for

    token = token_for(options.host, options.token)
    print(f"{len(runs)} run{'s' * (len(runs) > 1)} at {address(options.host, listener.getsockname()[1], token)}  (Ctrl-C ends)", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        serve(runs, listener, token)
    return 0


def parser() -> argparse.ArgumentParser:
    """Of the command's own options."""
    parser = argparse.ArgumentParser("fuligo view", description=_DESCRIPTION)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directory, or a directory that holds some")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument(
        "--port", type=int, help=f"port to listen on; 0 takes a free one (default {DEFAULT_PORT}, or a free one where it is taken)"
    )
    parser.add_argument("--token", help="asked of visitors (default: none on localhost, a random one elsewhere)")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write one page with everything in it, and serve nothing")
    return parser


def bind(host: str, port: int | None) -> socket.socket:
    """A socket that listens there; without a port the usual one, or a free one where that is taken.

    Raises:
        ConfigError: it is taken, or there is no such address.
    """
    try:
        return _bound(host, DEFAULT_PORT if port is None else port)
    except (OSError, OverflowError) as error:
        if port is None and isinstance(error, OSError):
            return bind(host, 0)
        given = f"--host {host}" + ("" if port is None else f" --port {port}")
        raise ConfigError(f"{given}: cannot listen there: {error}; give another, or --port 0 for a free one") from error


def _bound(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)  # whoever opens the address at once waits, and is not turned away
    except BaseException:
        listener.close()
        raise
    return listener
