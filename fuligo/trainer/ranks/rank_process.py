"""Process of a rank that the driver started: `python -m fuligo.trainer.ranks.rank_process ...`."""

import argparse
import os
from multiprocessing.connection import Connection


def main() -> None:
    """Serve the driver at the other end of an inherited socket."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--connection", type=int, required=True, help="file descriptor of the socket to the driver")
    options = parser.parse_args()
    os.set_inheritable(options.connection, False)  # else children of hooks would keep it open

    from fuligo.trainer.ranks.connected import serve
    from fuligo.trainer.ranks.rank import Rank, RankExecutor

    serve(Connection(options.connection), RankExecutor(Rank(options.rank, options.size)))


if __name__ == "__main__":
    main()
