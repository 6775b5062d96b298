"""Findings of `fuligo doctor` about a config: what it needs on this machine, and whether the machine has it."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from fuligo.config import Config
from fuligo.config.schemas import BACKENDS, schema
from fuligo.config.topology import engine_groups
from fuligo.engines.backend import engine_backend
from fuligo.engines.host import PortClaims
from fuligo.errors import EngineError
from fuligo.machine.facts import Machine
from fuligo.machine.findings import Finding
from fuligo.machine.packages import package_versions
from fuligo.quantities import amount, count

Versions = Callable[[Sequence[str], str, Mapping[str, str]], Mapping[str, str | None]]
NCCL_SHARED_MEMORY_BYTES = 1024**3
"""Size of NCCL's buffers between the GPUs of a node. Containers have 64 MiB of shared memory by default, too little for a collective."""
OWN_FILES = 256
"""Number of open files of a process, without its connections: libraries, data, logs."""


def needs(config: Config, machine: Machine, versions: Versions = package_versions) -> list[Finding]:
    """Return a finding for everything that a run needs on this node, whether the node has it or not. `versions`: see `package_versions`."""
    checks = (_packages(config, machine, versions), _gpus(config, machine), _links(config, machine), _shared_memory(config, machine))
    return [*(finding for check in checks for finding in check), *_ports(config), _open_files(config, machine)]


def num_gpus_of_node(config: Config, machine: Machine) -> int:
    """Return the number of GPUs that the run uses on this node; 0 if it computes on the CPU."""
    asked = config.cluster.device
    on_cpu = asked == "cpu" or (asked == "auto" and not machine.gpus.devices)
    return 0 if on_cpu else min(config.total_num_gpus, config.cluster.num_gpus_per_node)


def _packages(config: Config, machine: Machine, versions: Versions) -> Iterator[Finding]:
    """Yield a finding for each package that the run needs, with a fix if it is missing or not the version whose flags fuligo knows."""
    here = sys.executable
    trainer, pinned = config.trainer_capabilities, {schema(group).package: schema(group).version for group in BACKENDS}
    needed = (*trainer.packages, *(trainer.gpu_packages if num_gpus_of_node(config, machine) > 0 else ()))
    for package in needed if config.trains else ():
        yield _package(versions, here, package, pinned.get(package))
    if engine_groups(config):
        python = config.engine.interpreter
        for package in config.engine_capabilities.packages:
            yield _package(versions, python, package, pinned.get(package), config.engine_environment.settings())
    if config.num_nodes > 1:
        yield _package(versions, here, "ray")
    if config.data.multimodal_keys:
        yield _package(versions, here, "pillow")
    for package in ("tensorboard", "wandb", "trackio", "mlflow"):
        if getattr(config.observability, f"use_{package}"):
            yield _package(versions, here, package)


def _package(
    versions: Versions, python: str, name: str, wanted: str | None = None, environment: Mapping[str, str] = MappingProxyType({})
) -> Finding:
    found = versions([name], python, environment)[name]
    exact = name if wanted is None else f"{name}=={wanted}"
    fix = f"{python} -m pip install {exact}"
    if found is None:
        return Finding(name, "missing", f"the config needs it: {fix}")
    if wanted is not None and found != wanted:
        return Finding(name, found, f"the flags were checked against {wanted}: {fix}")
    return Finding(name, found)


def _gpus(config: Config, machine: Machine) -> Iterator[Finding]:
    asked, devices, torch = config.cluster.device, len(machine.gpus.devices), machine.torch
    needed = num_gpus_of_node(config, machine)
    if needed == 0:
        processes = f"{config.total_num_gpus} processes" if config.total_num_gpus > 1 else "1 process"
        found = f"CPU, {processes}" + (" (--device auto finds no GPU)" if asked == "auto" else "")
        needs_gpus = config.trainer_capabilities.needs_gpus and asked == "auto"
        fix = "the Megatron trainer needs GPUs; run fuligo doctor on a node of the cluster"
        yield Finding("device", found, fix if needs_gpus else None)
        return
    value = f"{needed} needed, {devices} here"
    if devices < needed:
        fix = "use fewer (--actor-num-gpus-per-node, --rollout-num-gpus), set --num-gpus-per-node, or use --device cpu"
        yield Finding("GPUs", value, fix)
    elif torch is not None and torch.num_devices < needed:
        cause = "torch is a CPU build; install a CUDA build" if torch.cuda is None else "check the driver and CUDA_VISIBLE_DEVICES"
        yield Finding("GPUs", f"{value}, but torch sees {torch.num_devices}", cause)
    else:
        yield Finding("GPUs", value)
    if needed > 1 and torch is not None:
        yield Finding("NCCL", torch.nccl or "none", None if torch.nccl else "runs on several GPUs need NCCL: install a CUDA build of torch")


def _links(config: Config, machine: Machine) -> Iterator[Finding]:
    """Yield a finding on the links between the GPUs of a tensor-parallel group, which exchange activations in every layer."""
    here = num_gpus_of_node(config, machine)
    sizes = [(group.tp_size, "an engine", "--rollout-num-gpus-per-engine") for group in engine_groups(config)]
    sizes.append((config.parallel.tensor_model_parallel_size, "the trainer", "--tensor-model-parallel-size"))
    size, whose, option = max(sizes, key=lambda entry: entry[0])
    if min(size, here) < 2 or len(machine.gpus.devices) < 2:
        return
    value = f"{size} GPUs of {whose} share each matrix"
    warning = None
    if pairs := machine.gpus.without_peer_access(here):
        one, other = pairs[0]
        warning = f"GPUs {one} and {other} cannot access each other's memory and copy through the host; lower {option}"
    elif pairs := machine.gpus.without_nvlink(here):
        one, other = pairs[0]
        warning = (
            f"GPUs {one} and {other} have no NVLink, so every layer waits for PCIe; lower {option} to the number of GPUs that "
            "NVLink connects"
        )
    yield Finding("peer access", value, warning=warning)


def _shared_memory(config: Config, machine: Machine) -> Iterator[Finding]:
    needed = _shared_bytes(config, machine)
    if needed == 0:
        return
    free = machine.shared_memory_bytes
    if free is None:
        yield Finding("shared memory", "no /dev/shm", "weights and NCCL need it: mount a tmpfs there")
        return
    fix = None if free >= needed else "make it larger (docker run --shm-size); on a CPU a smaller --update-weight-buffer-size also helps"
    yield Finding("shared memory", f"{amount(free)} free; the run may need {amount(needed)}", fix)


def _shared_bytes(config: Config, machine: Machine) -> int:
    """Return the peak use of /dev/shm in bytes: NCCL's buffers, and either two weight buckets (one read, one filled) or all weights."""
    gpus = num_gpus_of_node(config, machine)
    nccl = NCCL_SHARED_MEMORY_BYTES if gpus > 1 else 0
    if not config.needs_engine or config.debug.debug_rollout_only:
        return nccl
    weights = sum(file.stat().st_size for file in config.hf_checkpoint_path.glob("*.safetensors"))
    transport = config.weight_sync.update_weight_transport
    if transport == "disk" or (transport == "auto" and config.engine.rollout_external_engine_addrs):
        return nccl + weights
    if gpus == 0 and transport in ("auto", "tensor"):
        return nccl + min(weights, 2 * config.weight_sync.update_weight_buffer_size)
    return nccl


def _ports(config: Config) -> Iterator[Finding]:
    """Yield a finding on whether the ports that the engines need can be claimed; release them afterwards."""
    sizes = engine_backend(config).claimed_ports(config)
    if not sizes:
        return
    engines = count(sum(group.num_engines for group in engine_groups(config)), "engine")
    with PortClaims() as claims:
        try:
            for size in sizes:
                claims.claim(size)
        except EngineError as error:
            yield Finding("ports", f"for {engines}", str(error))
            return
    yield Finding("ports", f"free for {engines}")


def _open_files(config: Config, machine: Machine) -> Finding:
    needed = (config.resolved_rollout_concurrency if config.needs_engine else 0) + OWN_FILES
    short = machine.num_open_files < needed
    fix = (
        f"each request in flight needs a connection; raise the hard limit (ulimit -Hn {needed}, docker run --ulimit nofile={needed}) or "
        "lower --rollout-concurrency"
    )
    return Finding("open files", f"{machine.num_open_files} per process; the run may need {needed}", fix if short else None)
