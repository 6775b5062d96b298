"""Hosts of a Slurm job."""

import pytest

from fuligo.cluster.hostfile import Host, expand_node_list, slurm_hosts, task_number
from fuligo.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login", ["login"]),
        ("gpu[08-10,12],login", ["gpu08", "gpu09", "gpu10", "gpu12", "login"]),
        ("gpu[8-10]", ["gpu8", "gpu9", "gpu10"]),
        ("rack[1-2]node[01-02]-ib", ["rack1node01-ib", "rack1node02-ib", "rack2node01-ib", "rack2node02-ib"]),
        ("a,b-[3],c", ["a", "b-3", "c"]),
    ],
)
def test_expand_node_list(text: str, names: list[str]) -> None:
    assert expand_node_list(text) == names


@pytest.mark.parametrize("text", ["", ",", "node[1-2", "node]1[", "node[a-b]", "node[1-]", "node[]", "a,,b", "node[[1]]"])
def test_expand_node_list_refuses_malformed_lists(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot read SLURM_JOB_NODELIST="):
        expand_node_list(text)


@pytest.mark.parametrize("text", ["-oProxyCommand=reboot", "a;reboot", "-w[1-2]"])
def test_expand_node_list_refuses_names_that_a_command_could_take_for_something_else(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a host name"):
        expand_node_list(text)


@pytest.mark.parametrize(("given", "num_slots"), [({"SLURM_GPUS_ON_NODE": "4"}, 4), ({"SLURM_GPUS_ON_NODE": "a100:2"}, 2), ({}, 8)])
def test_slurm_hosts_have_the_gpus_of_the_job(given: dict[str, str], num_slots: int) -> None:
    environment = {"SLURM_JOB_NODELIST": "n[1-2]", **given}
    assert slurm_hosts(environment, default_slots=8) == [Host("n1", num_slots), Host("n2", num_slots)]


def test_variables_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot read SLURM_GPUS_ON_NODE=all"):
        slurm_hosts({"SLURM_JOB_NODELIST": "n1", "SLURM_GPUS_ON_NODE": "all"}, default_slots=8)
    with pytest.raises(ConfigError, match="cannot read SLURM_PROCID=first"):
        task_number({"SLURM_PROCID": "first"})


@pytest.mark.parametrize(("given", "number"), [({}, 0), ({"SLURM_PROCID": ""}, 0), ({"SLURM_PROCID": "3"}, 3)])
def test_task_number(given: dict[str, str], number: int) -> None:
    assert task_number(given) == number
