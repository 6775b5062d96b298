"""The flags of the group `eval`."""

from __future__ import annotations

from fuligo.config.group import FlagGroup, flag

EVAL_NAME = r"^[^/\s]+$"
"""Pattern of data-set names; metrics are named `eval/<name>/...`."""


class EvalFlags(FlagGroup):
    """Evaluation on held-out prompts. Settings that are not given follow the rollout's."""

    eval_interval: int | None = flag(
        None, "rollouts between evaluations; the last rollout is always evaluated", unit="rollouts", source="slime", ge=1
    )
    eval_prompt_data: list[str] = flag([], "NAME PATH pairs; a single PATH gets the name aime", source="slime", path=True)
    eval_config: str | None = flag(
        None, "YAML file of data sets, each with its own sampling settings and reward", source="slime", path=True
    )
    n_samples_per_eval_prompt: int = flag(1, "responses per prompt", unit="samples", source="slime", ge=1)
    eval_max_response_len: int | None = flag(None, "longest response", unit="tokens", source="slime", ge=1)
    eval_temperature: float | None = flag(None, "sampling temperature; 0 is greedy", source="slime", ge=0)
    eval_top_p: float | None = flag(None, "nucleus sampling", source="slime", gt=0, le=1)
    eval_top_k: int | None = flag(None, "top-k sampling", source="slime", ge=-1)
    skip_eval_before_train: bool = flag(False, "skip the evaluation before the first step", source="slime")
