"""Transport of the weights, by the places of ranks and engines."""

from dataclasses import dataclass
from typing import Any, cast

import pytest

from fuligo.config.command_line import parse
from fuligo.errors import ConfigError
from fuligo.job.engines import choose_transport

SGLANG = ["--rollout-backend", "sglang"]
ELSEWHERE = [*SGLANG, "--rollout-external-engine-addrs", "host:30000"]


@dataclass
class Cluster:
    """Place of trainer rank 0 in the cluster."""

    sender_is_here: bool
    shared: bool = False
    """True if the engines are on the same machine."""

    def sender_shares_machine_with(self, engines: list[int]) -> bool:
        return self.shared


HERE, APART = Cluster(sender_is_here=True, shared=True), Cluster(sender_is_here=False)


def chosen(words: list[str], cluster: Cluster | None = None) -> str:
    return choose_transport(parse(["--hf-checkpoint", "M", "--device", "cpu", *words]).config, cast(Any, cluster))


@pytest.mark.parametrize(
    ("words", "cluster", "transport"),
    [
        ([], None, "tensor"),
        (SGLANG, None, "tensor"),
        (SGLANG, HERE, "tensor"),
        (SGLANG, APART, "gloo"),
        (ELSEWHERE, None, "disk"),
        (ELSEWHERE, HERE, "disk"),
        ([*ELSEWHERE, "--update-weight-transport", "gloo"], APART, "gloo"),
    ],
)
def test_auto_is_a_transport_that_reaches_the_engines(words: list[str], cluster: Cluster | None, transport: str):
    assert chosen(words, cluster) == transport


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (ELSEWHERE, "a directory on the driver's machine"),
        ([*SGLANG, "--update-weight-transport", "disk"], "works on one machine only"),
        ([*SGLANG, "--update-weight-transport", "tensor"], "works on one machine only"),
        ([], "the embedded engine runs on the driver's node"),
    ],
)
def test_a_transport_that_does_not_reach_the_engines_is_refused(words: list[str], problem: str):
    with pytest.raises(ConfigError, match=problem):
        chosen(words, APART)
