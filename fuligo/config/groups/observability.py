"""The flags of the group `observability`."""

from __future__ import annotations

from typing import Literal

from fuligo.config.group import FlagGroup, flag


class ObservabilityFlags(FlagGroup):
    """Run directory, console output and metric sinks."""

    run_dir: str | None = flag(None, "run directory (default runs/<name>)", path=True)
    name: str | None = flag(None, "run name (default: date and time)")
    progress: Literal["auto", "rich", "plain", "none"] = flag("auto", "console display; auto: rich on a terminal, plain elsewhere")
    save_samples: bool = flag(True, "write samples/rollout_*.parquet (true or false)")
    use_tensorboard: bool = flag(False, "also write TensorBoard events to the run directory")
    use_wandb: bool = flag(False, "also report to Weights & Biases", source="slime")
    wandb_project: str | None = flag(None, "W&B project", source="slime")
    wandb_group: str | None = flag(None, "W&B group", source="slime")
    wandb_mode: Literal["online", "offline", "disabled"] | None = flag(None, "W&B mode", source="slime")
