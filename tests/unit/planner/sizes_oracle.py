"""Divisibility of a recipe's sizes by plain arithmetic on its file and config.json, independent of the planner."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SIZES = {
    "cluster": ("actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus", "rollout_num_gpus_per_engine"),
    "parallel": (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
    ),
    "train": ("num_steps_per_rollout", "global_batch_size"),
    "sglang": ("dp_size", "ep_size", "moe_dense_tp_size", "ep_num_redundant_experts"),
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Config file and its model."""

    file: dict[str, Any]
    model: dict[str, Any]
    overrides: dict[str, int]
    """Sizes given on the command line."""

    def size_names(self) -> list[str]:
        """Return the sizes in the file; those of a server group as `num_gpus 1`, `num_gpus_per_engine 1`."""
        names = [
            ("sglang_" if group == "sglang" else "") + name
            for group, sizes in _SIZES.items()
            for name in sizes
            if name in self.file.get(group, {})
        ]
        if self._groups() and "sglang_ep_size" in names:
            names.remove("sglang_ep_size")  # of an engine that spreads its experts over all of its GPUs, whatever is given
        groups = [f"{name} {number}" for number in range(len(self._groups())) for name in ("num_gpus", "num_gpus_per_engine")]
        return names + groups

    def size(self, name: str) -> int:
        inner, _, number = name.partition(" ")
        return self._groups()[int(number)][inner] if number else self._get(name, 0)

    def resized(self, name: str, value: int) -> Recipe:
        inner, _, number = name.partition(" ")
        if not number:
            return Recipe(self.file, self.model, {**self.overrides, name: value})
        file = copy.deepcopy(self.file)
        file["engine"]["sglang_config"][0]["server_groups"][int(number)][inner] = value
        return Recipe(file, self.model, self.overrides)

    def fits(self) -> bool:
        """Return whether every size divides what it must."""
        return self._trainer_fits() and self._layers_fit() and self._batch_fits() and self._engines_fit()

    def _groups(self) -> list[dict[str, Any]]:
        topology = self.file.get("engine", {}).get("sglang_config")
        return topology[0]["server_groups"] if topology else []

    def _get(self, name: str, default: Any) -> Any:
        if name in self.overrides:
            return self.overrides[name]
        inner = name.removeprefix("sglang_")
        groups = ["sglang"] if inner != name else [group for group in self.file if group != "sglang"]
        return next((self.file[group][inner] for group in groups if inner in self.file.get(group, {})), default)

    def _num_trainer_gpus(self) -> int:
        return self._get("actor_num_nodes", 1) * self._get("actor_num_gpus_per_node", 8)

    def _experts(self) -> int:
        return self.model.get("n_routed_experts", 0)

    def _trainer_fits(self) -> bool:
        tp, pp, cp = (self._get(f"{name}_parallel_size", 1) for name in ("tensor_model", "pipeline_model", "context"))
        ep, etp = self._get("expert_model_parallel_size", 1), self._get("expert_tensor_parallel_size", tp)
        gpus, heads, experts = self._num_trainer_gpus(), self.model["num_attention_heads"], self._experts()
        split = gpus % (tp * pp * cp) == 0 and gpus % (etp * ep * pp) == 0 and heads % tp == 0
        return split and self._get("actor_num_gpus_per_node", 8) <= 8 and (experts % ep == 0 if experts else ep == 1)

    def _layers_fit(self) -> bool:
        pp, layers = self._get("pipeline_model_parallel_size", 1), self.model["num_hidden_layers"]
        first, last = self._get("decoder_first_pipeline_num_layers", None), self._get("decoder_last_pipeline_num_layers", None)
        middle = pp - (first is not None) - (last is not None)
        rest = layers - (first or 0) - (last or 0)
        if middle == 0:
            return rest == 0
        if middle < 0 or rest <= 0 or rest % middle:
            return False
        sizes = ([first] if first else []) + [rest // middle] * middle + ([last] if last else [])
        starts = [sum(sizes[:number]) + 1 for number in range(pp)]
        computing = {1, 2, *range(3, layers + 1, 4)}
        return self.model["model_type"] != "glm_moe_dsa" or computing.issuperset(starts)

    def _batch_fits(self) -> bool:
        samples = self._get("rollout_batch_size", 32) * self._get("n_samples_per_prompt", 8)
        steps = self._get("num_steps_per_rollout", 1)
        return samples % steps == 0 and self._get("global_batch_size", samples // steps) * steps == samples

    def _engines_fit(self) -> bool:
        gpus = self._get("rollout_num_gpus", self._num_trainer_gpus())
        groups = self._groups() or [{"num_gpus": gpus, "num_gpus_per_engine": self._get("rollout_num_gpus_per_engine", 1)}]
        return sum(group["num_gpus"] for group in groups) == gpus and all(
            self._engine_fits(group["num_gpus"], group["num_gpus_per_engine"]) for group in groups
        )

    def _engine_fits(self, gpus: int, size: int) -> bool:
        dp = self._get("sglang_dp_size", 1) if self._get("sglang_enable_dp_attention", False) else 1
        if gpus % size or (8 % size and size % 8) or size % dp or self.model["num_attention_heads"] % (size // dp):
            return False
        if self._get("sglang_moe_dense_tp_size", 1) not in (1, size):
            return False
        ep = size if self._get("sglang_moe_a2a_backend", "none") != "none" else self._get("sglang_ep_size", 1)
        experts = self._experts() + self._get("sglang_ep_num_redundant_experts", 0)
        return not self._experts() or (size % ep == 0 and experts % ep == 0)


def read_recipe(file: dict[str, Any]) -> Recipe:
    """Return the recipe of a config file's content."""
    model = json.loads(Path(file["model"]["model_config_file"]).read_text(encoding="utf-8"))
    return Recipe(file, model | model.get("text_config", {}), {})
