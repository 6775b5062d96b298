"""`fuligo schema`: the JSON schema of config files, for editors."""

import json
from collections.abc import Sequence

from fuligo.config.json_schema import json_schema
from fuligo.errors import ConfigError

USAGE = """\
fuligo schema > fuligo.schema.json

Prints the JSON schema of config files. An editor with a YAML language server completes and checks flags of a file that begins with

    # yaml-language-server: $schema=fuligo.schema.json
"""


def main(arguments: Sequence[str]) -> int:
    """Print the schema. Raises ConfigError if there are arguments."""
    if any(argument in ("-h", "--help") for argument in arguments):
        print(USAGE, end="")
        return 0
    if arguments:
        raise ConfigError(f"fuligo schema takes no arguments, got {' '.join(arguments)}")
    print(json.dumps(json_schema(), indent=1))
    return 0
