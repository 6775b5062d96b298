"""Entry point for launch scripts that call `python3 train.py ...`, which is the same as `fuligo train ...`."""

import sys

from fuligo.cli import program

if __name__ == "__main__":
    program(["train", *sys.argv[1:]])
