"""Process of a trainer rank, started by the driver: `python -m fuligo.trainer.ranks.rank_process ...`."""

import argparse
import os
from multiprocessing.connection import Connection


def main() -> None:
    """Execute the driver's commands, which arrive on an inherited socket."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True, help="index of this rank")
    parser.add_argument("--size", type=int, required=True, help="number of ranks of the trainer")
    parser.add_argument("--connection", type=int, required=True, help="file descriptor of the socket to the driver")
    options = parser.parse_args()
    os.set_inheritable(options.connection, False)  # otherwise child processes of hooks would keep it open

    from fuligo.trainer.ranks.connected import serve
    from fuligo.trainer.ranks.executor import RankExecutor
    from fuligo.trainer.ranks.rank import Rank

    serve(Connection(options.connection), RankExecutor(Rank(options.rank, options.size)))


if __name__ == "__main__":
    main()
