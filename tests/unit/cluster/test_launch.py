"""Command that reaches the other hosts of a launch."""

import pytest

from fuligo.cluster.launch import connection_command
from fuligo.errors import ConfigError


@pytest.mark.parametrize("template", ["sh -c {command}", "sh -o 'ProxyCommand=nc %h {port}' -- {host} {command}"])
def test_connection_command_splits_like_a_shell(template: str) -> None:
    program, *_, command = connection_command(template)
    assert (program, command) == ("sh", "{command}")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("sh '{host} {command}", "no closing quotation"),
        ("sh {host} {cmd}", "has no {command}"),
        ("no-such-program {host} {command}", "no-such-program is not installed here"),
        ("", "has no {command}"),
    ],
)
def test_connection_command_names_what_is_wrong(template: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        connection_command(template)
    assert said in str(raised.value)
