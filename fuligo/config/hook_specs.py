"""Signatures of the hooks, and the check of a hook against its signature."""

import inspect
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from fuligo.config import Config


@dataclass(frozen=True, slots=True)
class HookShape:
    """Properties of a hook that decide whether its flag accepts it, taken from the object or from its source."""

    is_class: bool
    is_async: bool | None
    """True for a coroutine function; None if unknown."""
    methods: Collection[str] | None
    """Names of its methods; None if unknown."""
    signature: inspect.Signature | None
    """Signature of a function or constructor; None if unknown."""


@dataclass(frozen=True, slots=True)
class HookSpec:
    """Call signature of one kind of hook."""

    parameters: tuple[str, ...]
    """Positional arguments, in order; a hook may name them as it likes."""
    keywords: tuple[str, ...] = ()
    """Arguments passed by name."""
    kind: Literal["plain", "async", "plain or async"] = "plain"
    methods: tuple[str, ...] = ()
    """Methods that a class must have; empty for functions."""

    @property
    def call(self) -> str:
        """The call as it appears in error messages: `(args, sample)`."""
        return f"({', '.join([*self.parameters, *(f'{name}=...' for name in self.keywords)])})"

    def mismatch(self, hook: HookShape) -> str | None:
        """Return why a hook does not fit, or None if it fits as far as its shape is known."""
        if self.methods and not hook.is_class:
            return f"it must be a class with {', '.join(self.methods)}"
        missing = [] if hook.methods is None else [method for method in self.methods if method not in hook.methods]
        if missing:
            return f"the class lacks {', '.join(missing)}"
        if self.kind == "async" and hook.is_async is False:
            return f"it must be `async def`, called as {self.call}"
        if self.kind == "plain" and hook.is_async:
            return f"it must be a plain function, not `async def`, called as {self.call}"
        if hook.signature is None:
            return None
        try:
            hook.signature.bind(*self.parameters, **dict.fromkeys(self.keywords))
        except TypeError as error:
            return f"it is called as {self.call}, but its signature is {hook.signature}: {error}"
        return None


HOOKS: dict[str, HookSpec] = {
    "custom_rm_path": HookSpec(("args", "sample"), kind="plain or async"),
    "extra_rm_path": HookSpec(("args", "sample"), kind="plain or async"),
    "dynamic_sampling_filter_path": HookSpec(("args", "samples")),
    "buffer_filter_path": HookSpec(("args", "rollout_id", "buffer", "num_samples")),
    "custom_generate_function_path": HookSpec(("args", "sample", "sampling_params"), kind="async"),
    "agent": HookSpec(("session", "row"), kind="plain or async"),
    "environment": HookSpec(("row", "settings"), methods=("reset", "step", "close")),
    "rollout_function_path": HookSpec(("args", "rollout_id", "data_source"), keywords=("evaluation",), kind="plain or async"),
    "data_source_path": HookSpec(("args",), methods=("get_samples", "add_samples", "save", "load", "__len__")),
    "rollout_sample_filter_path": HookSpec(("args", "groups")),
    "rollout_all_samples_process_path": HookSpec(("args", "groups", "data_source")),
    "eval_function_path": HookSpec(("args", "rollout_id", "data_source"), keywords=("evaluation",), kind="plain or async"),
    "rollout_data_postprocess_path": HookSpec(("args", "groups")),
    "custom_rollout_log_function_path": HookSpec(("rollout_id", "args", "samples", "metrics", "rollout_time")),
    "custom_eval_rollout_log_function_path": HookSpec(("rollout_id", "args", "data", "metrics")),
    "custom_reward_post_process_path": HookSpec(("args", "samples")),
    "custom_advantage_function_path": HookSpec(("args", "samples")),
    "custom_loss_function_path": HookSpec(("args", "batch", "logprobs")),
    "custom_tis_function_path": HookSpec(("args", "batch", "old_logprobs")),
    "custom_pg_loss_reducer_function_path": HookSpec(("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss")),
    "custom_model_provider_path": HookSpec(("pre_process", "post_process"), keywords=("vp_stage",)),
    "before_train_step_path": HookSpec(("args", "rollout_id", "batch")),
    "sink_path": HookSpec(("args", "run_dir"), methods=("write", "close")),
}
"""Call signature of each hook, by the name of its flag."""

NONZERO_STD_FILTER = "fuligo.rollout.filters.check_reward_nonzero_std"
POP_FIRST_FILTER = "fuligo.rollout.filters.pop_first"
ALIASES = {
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std": NONZERO_STD_FILTER,
    "slime.rollout.buffer.pop_first": POP_FIRST_FILTER,
    "slime.ray.rollout_data_source.pop_first": POP_FIRST_FILTER,
    "slime.rollout.data_source.pop_first": POP_FIRST_FILTER,
}
"""Hook paths in slime's launch scripts -> paths of fuligo's equivalent functions."""


def given_hooks(config: Config) -> Iterator[tuple[str, str]]:
    """Yield flag name and path of every hook in the config."""
    for name in HOOKS:
        given = config.value_of(name)
        for path in given if isinstance(given, list) else [given]:
            if isinstance(path, str):
                yield name, path


def split_path(path: str) -> tuple[str, str]:
    """Split a hook's path into module (or file) and function."""
    module, _, function = path.rpartition(":" if ":" in path else ".")
    return module, function


def path_problem(path: str) -> str | None:
    """Return what is wrong with the form of a hook's path, or None."""
    module, function = split_path(path)
    if path.endswith(".py"):
        return f"it names a file but no function; write {path}:FUNCTION"
    if not module or not function.isidentifier():
        return "it must look like package.module.function or path/to/file.py:function"
    return None
