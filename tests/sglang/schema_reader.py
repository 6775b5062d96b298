"""Check schema files against the pinned packages and parse command lines with them, in SGLang's interpreter.

    python schema_reader.py SCRIPTS GROUP [GROUP ...]

SCRIPTS is the directory of `generate_schemas.py`, and each GROUP a schema to check. Standard input has the words of a command line for
each argument of SGLang and of its router, as JSON. Prints a line of JSON: the exit codes of the checks, and the values that the packages
read from the words.
"""

import argparse
import json
import sys

from sglang.srt.server_args import ServerArgs
from sglang_router.router_args import RouterArgs


def values(arguments: type, words: dict[str, list[str]]) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    arguments.add_cli_args(parser)
    required = ["--model-path", "M"] if any("--model-path" in a.option_strings and a.required for a in parser._actions) else []
    return {name: getattr(parser.parse_args([*required, *given]), name) for name, given in words.items()}


def main(scripts: str, groups: list[str]) -> None:
    sys.path.insert(0, scripts)
    import generate_schemas

    words = json.load(sys.stdin)
    codes = {group: generate_schemas.main(["--check", group]) for group in groups}
    print(json.dumps([codes, {"sglang": values(ServerArgs, words["sglang"]), "router": values(RouterArgs, words["router"])}]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
