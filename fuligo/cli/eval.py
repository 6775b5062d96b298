"""`fuligo eval`: evaluation of a checkpoint, without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fuligo.cli.chosen import chosen_for_evaluation, find_devices, with_installed_engine
from fuligo.cli.environment import apply_environment
from fuligo.cli.megatron_arguments import require_read_arguments
from fuligo.config import Config
from fuligo.config.command_line import parse
from fuligo.config.help import asked_for_help, help_text
from fuligo.config.validate import findings, require_no_errors, with_places
from fuligo.errors import ConfigError
from fuligo.models.hub import located, with_weights

if TYPE_CHECKING:
    from fuligo.job.evaluation import Evaluated

TRAINING_RULES = {"CFG-DATA-MISSING", "CFG-MAX-TOKENS", "CFG-ROLLOUT-GPUS", "CFG-RUN-LENGTH"}
"""Rules that apply to training only: its prompts, the size of micro-batches, GPUs for engines besides the trainer's, run length."""
_USAGE = """\
fuligo eval [--config FILE] [--load DIR [--ckpt-step N]] [--flag VALUE ...]

Evaluates the datasets of --eval-prompt-data or --eval-config, as a run does between its steps, and prints the metrics.
The weights are those of the newest checkpoint of --load, or of --ckpt-step; without --load, those of --hf-checkpoint.
Takes the arguments of fuligo train; arguments that only training needs may be left out. Metrics and every sample go to --run-dir
(default runs/eval-<time>), which must be new.

More: docs/rollout.md; the flags: fuligo train --help
"""


def main(arguments: Sequence[str]) -> int:
    """Evaluate and print the metrics."""
    if (topic := asked_for_help(arguments)) is not None:
        print(help_text(topic) if topic else _USAGE, end="")
        return 0
    parsed = parse(arguments)
    # Flags of SGLang's engines have an effect where it is installed, also if no flag chooses it.
    check(with_installed_engine(parsed.config, len(find_devices(parsed.config)))[0], parsed.places)
    found = chosen_for_evaluation(without_training(with_weights(located(parsed.config))))
    config = found.config

    # Imported late: help and wrong flags should not wait for these imports.
    from rich.console import Console

    from fuligo.cli.console import show_choice, show_warning
    from fuligo.cli.preflight import evaluation_problems
    from fuligo.observability.progress import warnings_shown_on

    for warning in (*parsed.warnings, *found.warnings):
        show_warning(warning)
    for choice in found.choices:
        show_choice(choice)
    apply_environment(config)
    if problems := evaluation_problems(config):
        raise ConfigError(*problems)
    from fuligo.job import evaluate

    with warnings_shown_on(Console(stderr=True)):
        evaluated = evaluate(config, run_directory(config, datetime.now()))
    _show(evaluated, of_others=bool(config.engine.rollout_external_engine_addrs))
    return 0


def check(config: Config, places: Mapping[str, str] | None = None) -> None:
    """Check the flags of an evaluation.

    `places`: file and line of the flags that the config file sets, as in `Parsed`. Raises ConfigError if flags do not fit together, or
    there is nothing to evaluate.
    """
    found = [finding for finding in findings(config) if finding.id not in TRAINING_RULES]
    require_no_errors(with_places(found, places or {}), config)
    if not config.has_eval:
        raise ConfigError("cannot evaluate: no dataset is given; use --eval-prompt-data, --eval-config or --eval-function-path")
    if config.engine.rollout_external_engine_addrs and config.checkpoint.load is not None:
        raise ConfigError(
            f"--load {config.checkpoint.load}: external engines (--rollout-external-engine-addrs) are evaluated with the weights "
            "that they have; remove one of the two flags"
        )
    require_read_arguments(config)


def without_training(config: Config) -> Config:
    """Return the config without training data and --save, and with --debug-rollout-only, so that no trainer is needed."""
    return config.model_copy(
        update={
            "data": config.data.model_copy(update={"prompt_data": [], "prompt_data_weights": []}),
            "checkpoint": config.checkpoint.model_copy(update={"save": None}),
            "debug": config.debug.model_copy(update={"debug_train_only": False, "debug_rollout_only": True}),
        }
    )


def run_directory(config: Config, started: datetime) -> Path:
    """Return `--run-dir`, or `runs/eval-<start time>`. `--name` is ignored, because it names the training run."""
    given = config.observability.run_dir
    return Path(given) if given is not None else Path("runs") / f"eval-{started:%Y-%m-%d-%H%M%S}"


def _show(evaluated: Evaluated, *, of_others: bool) -> None:
    """Print the metrics of every dataset. `of_others`: the engines are external and keep their weights."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    table = Table("dataset", "metric", "value", box=None, pad_edge=False)
    table.columns[-1].justify = "right"
    for key, value in evaluated.evaluation.metrics.items():
        _, data_set, metric = key.split("/", 2)
        table.add_row(data_set, metric, f"{value:.4g}")
    console.print(table)
    adapter = "" if evaluated.adapter is None else f" with the adapter {evaluated.adapter}"
    weights = "those of the external engines" if of_others else f"{evaluated.weights.directory}{adapter}"
    console.print(f"weights: {weights}\nrun directory: {evaluated.run_dir}", markup=False)
