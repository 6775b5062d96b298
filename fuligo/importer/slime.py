"""Translation of slime's command lines to fuligo's: flags with other names, functions that are flags here, and defaults that differ."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from fuligo.config.flags import flags, option_name
from fuligo.config.help import shown_default
from fuligo.config.hook_specs import ALIASES
from fuligo.config.other_frameworks import moved, other_settings
from fuligo.config.python_path import VARIABLE as PYTHON_PATH
from fuligo.importer.calls import Training
from fuligo.quantities import count

_MEGATRON_DROPOUT = "0.1"

_LEAVE_IT_OUT = "remove it: "
_OF_SLIME = other_settings()["slime"]
_OF_OBSERVERS = {name: advice for name, advice in _OF_SLIME.items() if advice == _OF_SLIME["profile_target"] or name.startswith("wandb_")}
"""Flags that choose what is recorded of a run, not what it trains."""
LEFT_OUT = {
    name: advice.removeprefix(_LEAVE_IT_OUT)
    for name, advice in (moved() | _OF_OBSERVERS).items()
    if advice.startswith(_LEAVE_IT_OUT) or name in _OF_OBSERVERS
}
"""Flags of slime that are left out, by flat name, each with the reason."""

_WITHOUT_EFFECT = {
    "make_vocab_size_divisible_by": "fuligo pads the vocabulary as its layout needs; checkpoints hold no padding",
    "no_position_embedding": "rotary models have no learned positions",
    "enable_experimental": "fuligo needs no switch for the parts of Megatron-Core that it uses",
    "no_check_for_nan_in_loss_and_grad": "fuligo always ends a run whose loss is not finite",
}
"""Megatron's flags that change nothing that fuligo trains, by flat name, each with the reason."""

_DEFAULT_FUNCTIONS = {
    "rollout_function_path": ("slime.rollout.sglang_rollout.generate_rollout",),
    "eval_function_path": ("slime.rollout.sglang_rollout.generate_rollout",),
    "data_source_path": ("slime.rollout.data_source.RolloutDataSource", "slime.rollout.data_source.RolloutDataSourceWithBuffer"),
}
"""Flags that name a function, by flat name, each with the functions of slime whose work fuligo does without the flag."""


@dataclass(slots=True)
class _Line:
    """Command line while it is translated: pairs (flat name, values) in order; a flag that is given twice has two entries."""

    given: list[tuple[str, list[str]]]
    notes: list[str] = field(default_factory=list)

    @classmethod
    def parse(cls, arguments: tuple[str, ...]) -> _Line:
        given: list[tuple[str, list[str]]] = [("", [])]
        for token in arguments:
            if token.startswith("--"):
                option, equals, value = token.partition("=")
                given.append((option[2:].replace("-", "_"), [equals + value] if equals else []))
            else:
                given[-1][1].append(token)
        return cls(given)

    def arguments(self) -> tuple[str, ...]:
        tokens: list[str] = []
        for name, values in self.given:
            attached = values[0] if values and values[0].startswith("=") else ""
            tokens += ([option_name(name) + attached] if name else []) + values[1 if attached else 0 :]
        return tuple(tokens)

    def has(self, name: str) -> bool:
        return any(given == name for given, _ in self.given)

    def value(self, name: str, default: str = "") -> str:
        """Return the first value of the last occurrence of a flag; `default` if it does not occur or has no value."""
        values = [values for given, values in self.given if given == name]
        return values[-1][0].removeprefix("=") if values and values[-1] else default

    def number(self, name: str, default: int) -> int:
        text = self.value(name)
        return int(text) if text.isdecimal() else default

    def remove(self, name: str) -> None:
        self.given = [(given, values) for given, values in self.given if given != name]

    def add(self, name: str, *values: str) -> None:
        self.given.append((name, list(values)))


def translate(training: Training) -> tuple[tuple[str, ...], list[str]]:
    """Return the arguments of a slime job for fuligo, and notes on what was changed and what is left to do."""
    line = _Line.parse(training.arguments)
    if training.is_async and not line.has("async_mode"):
        line.add("async_mode", "one-step")
    for change in (_sft, _fully_async, _distillation, _concurrency, _warmup, _leave_out, _fill_defaults, _name_functions):
        change(line)
    return line.arguments(), line.notes


def without_megatron(environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the environment of a job without Megatron-LM's directories in its PYTHONPATH, which would shadow the installed
    Megatron-Core, and a note if there were any.
    """
    directories = environment.get(PYTHON_PATH, "").split(os.pathsep)
    kept = [directory for directory in directories if not PurePosixPath(directory).name.lower().startswith("megatron")]
    if kept == directories:
        return dict(environment), []
    removed = ", ".join(directory for directory in directories if directory not in kept)
    rest = {name: value for name, value in environment.items() if name != PYTHON_PATH}
    path = os.pathsep.join(directory for directory in kept if directory)
    note = f"{removed} is left out of {PYTHON_PATH}: fuligo uses the installed Megatron-Core"
    return rest | ({PYTHON_PATH: path} if path else {}), [note]


def _is_sft(line: _Line) -> bool:
    return line.value("loss_type") == "sft_loss"


def _sft(line: _Line) -> None:
    if line.value("rollout_function_path") == "slime.rollout.sft_rollout.generate_rollout":
        line.remove("rollout_function_path")
        if not _is_sft(line):
            line.remove("loss_type")
            line.add("loss_type", "sft_loss")
        line.notes.append("slime's SFT rollout function is replaced by --loss-type sft_loss")
    if _is_sft(line) and line.has("debug_train_only") and not line.has("load_debug_rollout_data"):
        line.remove("debug_train_only")
        line.notes.append("--debug-train-only is left out: --loss-type sft_loss starts no engines")


def _fully_async(line: _Line) -> None:
    if line.value("rollout_function_path").rpartition(".")[2] == "generate_rollout_fully_async":
        line.remove("rollout_function_path")
        line.remove("async_mode")
        line.add("async_mode", "full")
        replaced = "slime's fully asynchronous rollout function is replaced by --async-mode full"
        line.notes.append(f"{replaced}; limit the policy lag with --max-staleness")


def _distillation(line: _Line) -> None:
    if line.value("custom_rm_path") != "slime.rollout.on_policy_distillation.reward_func":
        return
    address = urlsplit(line.value("rm_url"))
    for name in ("custom_rm_path", "custom_reward_post_process_path", "rm_url"):
        line.remove(name)
    if address.netloc:
        line.add("opd_teacher_url", f"{address.scheme}://{address.netloc}")
    line.notes.append("slime's distillation functions are replaced by --opd-teacher-url, the server of --rm-url")


def _concurrency(line: _Line) -> None:
    """Translate slime's limit of concurrent requests per engine to one for all engines; leave it out if a rollout never exceeds it."""
    if _is_sft(line) or line.has("rollout_concurrency"):
        return
    given = line.number("sglang_server_concurrency", 0)
    line.remove("sglang_server_concurrency")
    trainers = line.number("actor_num_nodes", 1) * line.number("actor_num_gpus_per_node", 8)
    gpus = line.number("rollout_num_gpus", trainers if line.has("colocate") else 1)
    if not given:
        return
    limit = given * max(1, gpus // line.number("rollout_num_gpus_per_engine", 1))
    prompts = line.number("over_sampling_batch_size", line.number("rollout_batch_size", 1))
    num_requests = prompts * line.number("n_samples_per_prompt", 1)
    if limit < num_requests:
        line.add("rollout_concurrency", str(limit))
        ours = f"--rollout-concurrency {limit} for all engines"
        line.notes.append(f"--sglang-server-concurrency {given}, which is per engine, is replaced by {ours}")
    else:
        line.notes.append(f"--sglang-server-concurrency {given} is left out: a rollout has at most {count(num_requests, 'request')}")


def _warmup(line: _Line) -> None:
    if not line.has("lr_warmup_fraction"):
        return
    fraction, rollouts = float(line.value("lr_warmup_fraction", "0")), line.number("num_rollout", 0)
    samples = line.number("rollout_batch_size", 1) * line.number("n_samples_per_prompt", 1)
    steps = line.number("num_steps_per_rollout", max(1, samples // line.number("global_batch_size", samples)))
    line.remove("lr_warmup_fraction")
    if rollouts:
        line.add("lr_warmup_iters", str(round(fraction * rollouts * steps)))
        total = count(rollouts * steps, "step")
        line.notes.append(f"--lr-warmup-fraction {fraction} is replaced by --lr-warmup-iters {line.value('lr_warmup_iters')} of {total}")
    else:
        line.notes.append(f"--lr-warmup-fraction {fraction} is left out; set --lr-warmup-iters to {fraction} of the run's optimizer steps")


def _leave_out(line: _Line) -> None:
    left_out = LEFT_OUT | _WITHOUT_EFFECT
    for name in dict.fromkeys(name for name, _ in line.given if name in left_out):
        value = "" if name == "wandb_key" else line.value(name)
        line.remove(name)
        line.notes.append(f"{option_name(name)}{' ' + value if value else ''} is left out: {left_out[name]}")


def _needs_metadata(line: _Line) -> bool:
    judged = line.has("rm_type") or line.has("custom_rm_path") or line.has("rm_url") or line.has("use_opd")
    return not _is_sft(line) and (not judged or line.value("rm_type").removeprefix("boxed_") in ("gpqa", "ifbench"))


_DEFAULTS: Mapping[str, tuple[str, Callable[[_Line], bool]]] = {
    "actor_num_gpus_per_node": ("8", lambda line: True),
    "n_samples_per_prompt": ("1", lambda line: not _is_sft(line)),
    "lr_decay_style": ("linear", lambda line: True),
    "micro_batch_size": ("1", lambda line: not line.has("use_dynamic_batch_size")),
    "metadata_key": ("metadata", _needs_metadata),
}
"""Flags by flat name, each with slime's default and a function that returns whether a command line relies on it."""


def _fill_defaults(line: _Line) -> None:
    for name, (value, is_relied_on) in _DEFAULTS.items():
        if not line.has(name) and is_relied_on(line):
            line.add(name, value)
            ours = shown_default(flags()[name])
            line.notes.append(f"{option_name(name)} is not given: slime's default {value} is filled in (fuligo's: {ours})")
    if not line.has("rollout_max_response_len") and not _is_sft(line):
        option = "--rollout-max-response-len is not given: slime's only limit"
        if context := line.value("rollout_max_context_len"):
            line.add("rollout_max_response_len", context)
            line.notes.append(f"{option}, --rollout-max-context-len {context}, is filled in")
        else:
            default = flags()["rollout_max_response_len"].default
            line.notes.append(f"{option} is the model's context, fuligo's is {default} tokens; set it")
    for name, column, is_read in (
        ("metadata_key", "metadata", line.has("custom_rm_path") or line.has("custom_generate_function_path")),
        ("tool_key", "tools", line.has("apply_chat_template")),
    ):
        if is_read and not line.has(name):
            where = f"slime reads the column {column} where rows have it"
            line.notes.append(f"{option_name(name)} is not given: {where}; if yours do, add {option_name(name)} {column}")
    for name in ("attention_dropout", "hidden_dropout"):
        if line.value(name, _MEGATRON_DROPOUT) not in ("0", "0.0"):
            line.notes.append(f"{option_name(name)} is {line.value(name, _MEGATRON_DROPOUT)} in slime: fuligo trains without dropout")


def _name_functions(line: _Line) -> None:
    """Remove functions of slime whose work fuligo does by itself, and note the ones that must be ported."""
    for name, defaults in _DEFAULT_FUNCTIONS.items():
        if line.value(name) in defaults:
            line.remove(name)
    for name, values in line.given:
        value = values[0].removeprefix("=") if values else ""
        if name.endswith("_path") and value.startswith(("slime.", "slime_plugins.")) and value not in ALIASES:
            line.notes.append(f"{option_name(name)} {value} is a function of slime: port it to fuligo's hook (docs/hooks.md)")
