"""Settings of slime, TRL and verl that fuligo names differently or lacks, each with what to use instead."""

from fuligo.config.flags import flags, passthrough_flags
from fuligo.config.other_frameworks.advice import DATA, GPUS, LORA, MODEL, TENSORBOARD
from fuligo.config.other_frameworks.slime import OF_SLIME
from fuligo.config.other_frameworks.trl import OF_TRL
from fuligo.config.other_frameworks.verl import OF_VERL, SECTIONS
from fuligo.config.schemas import schema

_GUESSED = {
    "lora": LORA,
    "use_lora": LORA,
    "enable_lora": LORA,
    "data": DATA,
    "dataset": DATA,
    "train_data": DATA,
    "output": "use --run-dir",
    "save_dir": "use --save",
    "checkpoint_dir": "use --save",
    "resume": "use --load, the directory of checkpoints",
    "steps": "use --num-rollout",
    "group_size": "use --n-samples-per-prompt",
    "reward_fn": "use --rm-type, or --custom-rm-path for a function of your own",
    "max_tokens": "use --rollout-max-response-len",
    "max_length": "use --rollout-max-response-len (supervised: --rollout-max-prompt-len, which counts the whole conversation)",
    "stop": "use --rollout-stop",
    "save_every": "use --save-interval, in rollouts",
    "eval_every": "use --eval-interval, in rollouts",
    "gpus": GPUS,
    "num_gpus": GPUS,
    "n_gpus": GPUS,
    "batch_size": "use --rollout-batch-size, the prompts of a rollout, or --global-batch-size, the samples of an optimizer step",
    "epochs": "use --num-epoch",
    "num_epochs": "use --num-epoch",
    "train_iters": "use --num-rollout",
    "model_path": MODEL,
    "tensorboard": "use --use-tensorboard",
    "tensorboard_dir": TENSORBOARD,
    "wandb": "use --use-wandb",
    "tp": "use --tensor-model-parallel-size (of engines: --rollout-num-gpus-per-engine)",
    "tp_size": "use --tensor-model-parallel-size (of engines: --rollout-num-gpus-per-engine)",
    "rollout_num_engines": "use --rollout-num-gpus and --rollout-num-gpus-per-engine; their quotient is the number of engines",
}
"""Names that people try first."""

MOVED = OF_SLIME | {name: advice for name, advice in OF_VERL.items() if "." not in name} | OF_TRL | _GUESSED
"""Flat name of a setting that slime, TRL or verl has (or that people guess) and fuligo lacks -> what to use instead."""


def elsewhere(name: str) -> str:
    """Return `; use --lr` for a name of `MOVED`, or nothing.

    Args:
        name: `learning_rate`, or with dots as verl's `actor_rollout_ref.actor.optim.lr`.
    """
    name = name.lstrip("+").replace("-", "_")
    advice = _of_verl(name.split(".")) if "." in name else MOVED.get(name)
    return f"; {advice}" if advice is not None else ""


def _of_verl(parts: list[str]) -> str:
    """Return the advice for the longest known suffix of a dotted name, for its innermost section, or for a flag of the same name."""
    for first, part in enumerate(parts):
        ending = ".".join(parts[first:])
        if ending in OF_VERL:
            return OF_VERL[ending]
        if part in SECTIONS:
            return SECTIONS[next(section for section in reversed(parts) if section in SECTIONS)]
    ours = flags().get(parts[-1]) or passthrough_flags("megatron").get(parts[-1])
    if ours is not None and ours.name != "name":  # verl's `name` in a section names a class, not the run
        return f"use {ours.option}"
    return schema("megatron").hints.get(parts[-1]) or "docs/coming-from.md translates the settings of other frameworks"
