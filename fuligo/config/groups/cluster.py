"""The flags of the group `cluster`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fuligo.config.group import FlagGroup, flag

EnvironmentValue = Annotated[str, Field(coerce_numbers_to_str=True)]
"""Value of an environment variable; numbers become text, because YAML reads `NVSHMEM_DISABLE_NCCL: 1` as a number."""


class ClusterFlags(FlagGroup):
    """Processes of the run and their devices."""

    device: Literal["auto", "cpu", "cuda"] = flag("auto", "device to compute on; auto uses CUDA if available")
    train_backend: Literal["auto", "torch", "megatron"] = flag("auto", "trainer; auto: torch unless a Megatron flag is given")
    rollout_backend: Literal["auto", "embedded", "sglang"] = flag(
        "auto",
        "engine; auto: embedded unless the trainer is megatron or you give an SGLang flag, --rollout-num-gpus* or external engines",
    )
    launcher: Literal["auto", "local", "ray"] = flag(
        "auto", "launcher of ranks and engines; auto: ray in a Ray job, with RAY_ADDRESS set, or for several nodes, else local"
    )
    actor_num_nodes: int = flag(1, "trainer nodes", source="slime", ge=1)
    actor_num_gpus_per_node: int | None = flag(
        None,
        "trainer processes per node, one per GPU (default: 8 with megatron, 1 with torch or on a CPU)",
        source="slime",
        ge=1,
    )
    num_gpus_per_node: int = flag(8, "GPUs per node", source="slime", ge=1)
    rollout_num_gpus: int | None = flag(
        None, "GPUs of all engines (default with --colocate: the trainer's); 0: external engines only", source="slime", ge=0
    )
    rollout_num_gpus_per_engine: int | None = flag(
        None, "GPUs per engine (default 1); SGLang's tensor-parallel size is this / its pipeline size", source="slime", ge=1
    )
    colocate: bool = flag(False, "trainer and engines share GPUs and take turns; each is offloaded while the other works", source="slime")
    hostfile: str | None = flag(
        None, "file with the nodes of the cluster for fuligo launch, one `address slots=8` per line", source="slime", path=True
    )
    env: dict[str, EnvironmentValue] = flag({}, "environment variables of all processes, as a JSON object", source="slime")
