"""The flags of the group `cluster`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fuligo.config.group import FlagGroup, flag

EnvironmentValue = Annotated[str, Field(coerce_numbers_to_str=True)]
"""YAML reads `NVSHMEM_DISABLE_NCCL: 1` as a number; an environment holds texts."""


class ClusterFlags(FlagGroup):
    """Which processes run, and on which devices."""

    device: Literal["auto", "cpu", "cuda"] = flag("auto", "where to compute; auto takes CUDA where there is one")
    train_backend: Literal["auto", "torch", "megatron"] = flag("auto", "trainer; auto is torch unless a Megatron flag is given")
    rollout_backend: Literal["auto", "embedded", "sglang"] = flag(
        "auto",
        "engine; auto is embedded unless the trainer is megatron, an SGLang flag or --rollout-num-gpus* is given, or engines run already",
    )
    launcher: Literal["auto", "local", "ray"] = flag(
        "auto", "who starts ranks and engines; auto is ray in a Ray job, with RAY_ADDRESS set, or for several nodes, else this process"
    )
    actor_num_nodes: int = flag(1, "nodes of the trainer", source="slime", ge=1)
    actor_num_gpus_per_node: int | None = flag(
        None,
        "trainer processes per node, one a GPU (default: 8 with megatron, 1 with torch or on a CPU)",
        source="slime",
        ge=1,
    )
    num_gpus_per_node: int = flag(8, "GPUs that a node has", source="slime", ge=1)
    rollout_num_gpus: int | None = flag(
        None, "GPUs of all engines (with --colocate: the trainer's by default); 0: external engines only", source="slime", ge=0
    )
    rollout_num_gpus_per_engine: int | None = flag(
        None, "GPUs of one engine (default 1); SGLang's tensor parallelism is this / its pipeline size", source="slime", ge=1
    )
    colocate: bool = flag(False, "trainer and engines share GPUs and take turns: each is offloaded while the other works", source="slime")
    hostfile: str | None = flag(None, "nodes of the cluster, one `address slots=8` a line, for fuligo launch", source="slime", path=True)
    env: dict[str, EnvironmentValue] = flag({}, "environment variables of every process, as a JSON object", source="slime")
