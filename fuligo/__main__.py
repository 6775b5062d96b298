"""`python -m fuligo`."""

from fuligo.cli import program

program()
