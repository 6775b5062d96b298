"""What each hook is called with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HookSpec:
    """How fuligo calls one kind of hook."""

    parameters: tuple[str, ...]
    """Positional arguments, in order; a hook may name them as it likes."""
    keywords: tuple[str, ...] = ()
    """Arguments passed by name."""
    must_be_async: bool = False
    methods: tuple[str, ...] = ()
    """For a class: what its instances must have."""

    @property
    def call(self) -> str:
        """`(args, sample)`, for error messages."""
        return f"({', '.join([*self.parameters, *(f'{name}=...' for name in self.keywords)])})"


HOOKS: dict[str, HookSpec] = {
    "custom_rm_path": HookSpec(("args", "sample")),
    "dynamic_sampling_filter_path": HookSpec(("args", "samples")),
    "buffer_filter_path": HookSpec(("args", "rollout_id", "buffer", "num_samples")),
    "custom_generate_function_path": HookSpec(("args", "sample", "sampling_params"), must_be_async=True),
    "rollout_function_path": HookSpec(("args", "rollout_id", "data_source"), keywords=("evaluation",)),
    "data_source_path": HookSpec(("args",), methods=("get_samples", "add_samples", "save", "load", "__len__")),
    "rollout_sample_filter_path": HookSpec(("args", "groups")),
    "custom_reward_post_process_path": HookSpec(("args", "samples")),
    "custom_advantage_function_path": HookSpec(("args", "samples")),
    "custom_loss_function_path": HookSpec(("args", "batch", "logprobs")),
    "custom_tis_function_path": HookSpec(("args", "batch", "old_logprobs")),
    "custom_model_provider_path": HookSpec(("pre_process", "post_process"), keywords=("vp_stage",)),
    "before_train_step_path": HookSpec(("args", "rollout_id", "batch")),
}
"""By flag."""

NONZERO_STD_FILTER = "fuligo.rollout.filters.check_reward_nonzero_std"
ALIASES = {
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std": NONZERO_STD_FILTER,
    "slime.rollout.buffer.pop_first": "fuligo.rollout.buffer.pop_first",
    "slime.ray.rollout_data_source.pop_first": "fuligo.rollout.buffer.pop_first",
    "slime.rollout.data_source.pop_first": "fuligo.rollout.buffer.pop_first",
}
"""Paths that launch scripts of slime name -> the same functions here."""


def split_path(path: str) -> tuple[str, str]:
    """Module (or file) and function that a hook's path names."""
    module, _, function = path.rpartition(":" if ":" in path else ".")
    return module, function


def path_problem(path: str) -> str | None:
    """What is wrong with how a hook's path is written."""
    module, function = split_path(path)
    if path.endswith(".py"):
        return f"it names a file and no function in it; write {path}:FUNCTION"
    if not module or not function.isidentifier():
        return "it must look like package.module.function or path/to/file.py:function"
    return None
