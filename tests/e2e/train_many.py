"""Program of a user who starts several runs from Python, in a thread: prints the run directories."""

import asyncio
import sys

import fuligo

if __name__ == "__main__":
    print(*asyncio.run(asyncio.to_thread(fuligo.train_many, sys.argv[1:])), sep="\n")
