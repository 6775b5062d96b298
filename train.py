"""`python3 train.py ...` is `fuligo train ...`: for launch scripts that start training so."""

import sys

from fuligo.cli import program

if __name__ == "__main__":
    program(["train", *sys.argv[1:]])
