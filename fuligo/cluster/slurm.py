"""Hosts and GPUs of a Slurm job, from the variables that Slurm sets in it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import product

from fuligo.cluster.hostfile import Host, require_host_name
from fuligo.errors import ConfigError

NODES_VARIABLE = "SLURM_JOB_NODELIST"
SRUN = "srun --overlap --nodes=1 --ntasks=1 --cpu-bind=none --mem=0 --nodelist={host} sh -c {command}"
"""Command template. The step shares the job's CPUs, memory and GPUs with the other steps."""
_ENTRY = re.compile(r"(?:[^,\[\]]+|\[[^\[\]]*\])+")
_PART = re.compile(r"\[(?P<ranges>[^\[\]]*)\]|(?P<text>[^\[\]]+)")
_RANGE = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+))?", re.ASCII)


def slurm_hosts(environment: Mapping[str, str], *, default_slots: int) -> list[Host]:
    """Return the nodes of the job, each with the GPUs that Slurm gave the job on this one.

    Args:
        default_slots: slots of a node in a job that asked for no GPUs (a whole node, or a CPU)

    Raises:
        ConfigError: Slurm's variables cannot be read
    """
    given = environment.get("SLURM_GPUS_ON_NODE", "")
    count = given.rpartition(":")[2]  # some versions write the type first: `a100:4`
    if given and not count.isdecimal():
        raise ConfigError(f"cannot read SLURM_GPUS_ON_NODE={given}: it is not a number of GPUs; give the hosts with --hostfile")
    num_slots = int(count) if given else default_slots
    return [Host(name, num_slots) for name in expand_node_list(environment[NODES_VARIABLE])]


def task_number(environment: Mapping[str, str]) -> int:
    """Return the number of this task in its Slurm step; 0 in a batch script and outside of Slurm.

    Raises:
        ConfigError: SLURM_PROCID is not a number
    """
    given = environment.get("SLURM_PROCID") or "0"
    if not given.isdecimal():
        raise ConfigError(f"cannot read SLURM_PROCID={given}: it is not a number; unset it outside of Slurm")
    return int(given)


def expand_node_list(text: str) -> list[str]:
    """Expand Slurm's compressed list: `gpu[08-10,12],login` becomes gpu08, gpu09, gpu10, gpu12, login.

    Raises:
        ConfigError: the list is malformed
    """
    entries = _ENTRY.findall(text)
    if ",".join(entries) != text or not entries:
        raise _malformed(text)
    names = [name for entry in entries for name in _expand_entry(entry, text)]
    for name in names:
        require_host_name(name, NODES_VARIABLE)
    return names


def _expand_entry(entry: str, text: str) -> Iterator[str]:
    parts = [
        [part["text"]] if part["text"] is not None else [number for item in part["ranges"].split(",") for number in _numbers(item, text)]
        for part in _PART.finditer(entry)
    ]
    return ("".join(chosen) for chosen in product(*parts))


def _numbers(item: str, text: str) -> list[str]:
    """Return the numbers of `08-10`, as wide as the first."""
    match = _RANGE.fullmatch(item)
    if match is None:
        raise _malformed(text)
    first, last = match["first"], match["last"] or match["first"]
    return [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]


def _malformed(text: str) -> ConfigError:
    return ConfigError(f"cannot read {NODES_VARIABLE}={text}: expected a list such as node[01-04,7],login; give the hosts with --hostfile")
