"""The flags of the group `eval`."""

from __future__ import annotations

from fuligo.config.group import FlagGroup, flag

EVAL_NAME = r"^[^/\s]+$"
"""What a data set may be called: its metrics are `eval/<name>/...`."""


class EvalFlags(FlagGroup):
    """Held-out prompts. What is not given is inherited from the rollout."""

    eval_interval: int | None = flag(
        None, "rollouts between evaluations; the last rollout always evaluates", unit="rollouts", source="slime", ge=1
    )
    eval_prompt_data: list[str] = flag([], "NAME PATH pairs; a single PATH is a data set named aime", source="slime", path=True)
    eval_config: str | None = flag(None, "YAML file: several data sets, each with its own sampling and reward", source="slime", path=True)
    n_samples_per_eval_prompt: int = flag(1, "responses to each prompt", unit="samples", source="slime", ge=1)
    eval_max_response_len: int | None = flag(None, "longest response", unit="tokens", source="slime", ge=1)
    eval_temperature: float | None = flag(None, "sampling temperature; 0: always the likeliest token", source="slime", ge=0)
    eval_top_p: float | None = flag(None, "nucleus sampling", source="slime", gt=0, le=1)
    eval_top_k: int | None = flag(None, "top-k sampling", source="slime", ge=-1)
    skip_eval_before_train: bool = flag(False, "no evaluation of the untrained policy", source="slime")
