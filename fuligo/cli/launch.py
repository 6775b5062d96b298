"""`fuligo launch`: a run on the nodes of a hostfile or of a Slurm job, in a Ray cluster that starts and stops with it."""

import argparse
import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from fuligo.cli.chosen import checked
from fuligo.cli.megatron_arguments import require_read_arguments
from fuligo.config import Config
from fuligo.config.changes import apply_changes
from fuligo.config.command_line import Parsed, parse
from fuligo.config.findings import Change
from fuligo.config.launcher import ADDRESS_VARIABLE, COMMAND
from fuligo.config.validate import require_no_errors, with_places
from fuligo.errors import ConfigError
from fuligo.formats.private import private_directory
from fuligo.models.hub import located

DESCRIPTION = """\
  fuligo launch --hostfile F -- <arguments of fuligo train>
      starts Ray here and, by ssh, on the other hosts of F (one `address slots=8` per line), trains, and stops Ray
  fuligo launch -- <arguments of fuligo train>
      in a Slurm job, does the same on the job's nodes, by srun; with RAY_ADDRESS (KubeRay sets it), trains on that cluster
  fuligo launch --join ADDRESS:PORT --slots 8
      joins this machine to a running cluster until Ctrl-C
"""
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=10 -- {host} {command}"
"""Command template; ssh fails if a host does not answer for half a minute."""


def main(arguments: Sequence[str]) -> int:
    """Launch a run, or join a cluster; return the exit code. Raises ConfigError if --hostfile and --join are combined."""
    own, train = _split(list(arguments))
    options = parser().parse_args(own)
    with private_directory("fuligo-launch-") as logs:
        if options.join is None:
            COMMAND.set(("fuligo", "launch", *own, "--"))
            return _launch(options, train, logs)
        if options.hostfile is not None:
            raise ConfigError(
                "--hostfile and --join cannot be combined: the first starts a cluster, the second joins one; remove one of them"
            )
        return _join(options, logs)


def _launch(options: argparse.Namespace, train: list[str], logs: Path) -> int:
    from fuligo.cli.train import main as run
    from fuligo.cluster.hostfile import NODES_VARIABLE, SRUN, head_ip, head_of, read_hostfile, require_listed_once, slurm_hosts, task_number
    from fuligo.cluster.launch import LaunchedCluster, LaunchSettings, connection_command
    from fuligo.cluster.placement import place, require_slots

    parsed = parse(train)
    config = parsed.config
    default_slots = config.cluster.num_gpus_per_node
    if options.hostfile is not None:
        hosts, connection = read_hostfile(Path(options.hostfile), default_slots=default_slots), SSH
    elif os.environ.get(ADDRESS_VARIABLE):
        return run(train)
    elif NODES_VARIABLE not in os.environ:
        raise ConfigError(
            f"cannot launch: there are no hosts; use --hostfile F, start it in a Slurm job ({NODES_VARIABLE}), or set {ADDRESS_VARIABLE} "
            "to use a running cluster; on one machine use fuligo train"
        )
    elif number := task_number(os.environ):
        print(f"Slurm task {number} has nothing to do: task 0 starts the run, and a worker on every node")
        return 0
    else:
        hosts, connection = slurm_hosts(os.environ, default_slots=default_slots), SRUN
    placed = _checked_for_ray(parsed)
    require_slots(place(placed).node_sizes, {host.address: host.num_slots for host in hosts})
    head = head_of(hosts)
    require_listed_once(head, hosts)
    workers = tuple(host for host in hosts if host != head)
    settings = LaunchSettings(
        ip=head_ip(head, workers),
        num_slots=0 if head is None else head.num_slots,
        workers=workers,
        port=options.head_port,
        device=config.cluster.device,
        connection=connection_command(options.ssh or connection) if workers else (),
        logs=logs,
        timeout_s=options.timeout_s,
    )
    with asyncio.Runner() as runner:
        cluster = LaunchedCluster(settings)
        try:
            runner.run(cluster.wait_ready())
            return run(train)
        finally:
            runner.run(cluster.stop())


def _checked_for_ray(parsed: Parsed) -> Config:
    """Return the config that Ray places. Raises ConfigError for flags that `fuligo train` refuses, before any host starts."""
    config = parsed.config
    if config.cluster.launcher == "auto":
        config = apply_changes(config, [Change(("cluster", "launcher"), "ray")])
    found = checked(located(config))
    require_no_errors(with_places(found.findings, parsed.places), found.config)
    require_read_arguments(found.config)
    return found.config


def _join(options: argparse.Namespace, logs: Path) -> int:
    from fuligo.cluster.launch import join

    if "RAY_AUTH_TOKEN" not in os.environ:
        raise ConfigError(
            "cannot join a cluster: RAY_AUTH_TOKEN is not set; set it to the value that the head was started with, and RAY_AUTH_MODE=token"
        )
    asyncio.run(
        join(options.join, options.host, options.slots, name=options.name, device=options.device, attached=options.attached, logs=logs)
    )
    return 0


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments at `--`."""
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command's own options."""
    made = argparse.ArgumentParser("fuligo launch", usage="\n" + DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--hostfile", help="hostfile, one address per line")
    made.add_argument("--head-port", type=int, default=6379, help="port of Ray on this machine (default: 6379)")
    made.add_argument("--ssh", help=f"template for running a command on a host (default: {SSH}; in a Slurm job, srun)")
    made.add_argument("--timeout-s", type=float, default=300.0, help="seconds within which all hosts must join (default: 300)")
    made.add_argument("--join", metavar="ADDRESS:PORT", help="address of a Ray head")
    made.add_argument("--host", help="IP address at which other nodes reach this machine (default: that of the interface to the head)")
    made.add_argument("--name", help="name of this machine in Ray (default: its address)")
    made.add_argument("--slots", type=int, default=8, help="GPUs of this machine (default: 8)")
    made.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="device to train on (default: auto); with cpu, --slots counts processes, not GPUs",
    )
    made.add_argument("--attached", action="store_true", help="exit when standard input closes")
    return made
