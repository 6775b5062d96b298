"""Checks of the weights that a config names, before a model loads: initial weights, checkpoint, value model, teacher, engines' models."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fuligo.checkpoint.location import (
    Checkpoint,
    WeightsOnly,
    nothing_left,
    resolve,
    value_weights_directory,
    weights_directory,
    weights_of,
)
from fuligo.cli.adapter_problems import adapter_problems
from fuligo.config import Config
from fuligo.config.capabilities import TRAINER_CAPABILITIES
from fuligo.config.server_groups import TEACHER
from fuligo.config.topology import engine_groups
from fuligo.errors import CheckpointError, ConfigError
from fuligo.formats.adapter_config import AdapterConfig, adapter_directory, is_adapter
from fuligo.formats.checkpoint_files import VALUE_MODEL, is_distributed, model_directory, no_value_model
from fuligo.formats.hugging_face import (
    MTP_PREFIX,
    DamagedFileError,
    architecture_difference,
    brings_code,
    checkpoint_problems,
    is_trainable,
    read_config_json,
    read_model_config,
    read_shapes,
)
from fuligo.formats.quantization import EngineQuantization
from fuligo.models.registry import FAMILIES, has_mtp_module

_TOKENIZER = "tokenizer.json"
_SHOWN = 3


def vocabulary_difference(teacher: Path, student: Path) -> str | None:
    """Return why a teacher cannot score the student's samples, or None.

    With equal tokenizers the teacher's vocabulary may be larger, because its padding is never sampled. If a tokenizer.json is missing, as
    for a model with its own tokenizer code, only the sizes are compared. Raises DamagedFileError if a config.json is missing or unreadable.
    """
    size, needed = (read_model_config(directory).get("vocab_size") for directory in (teacher, student))
    same = _differing(teacher / _TOKENIZER, student / _TOKENIZER)
    if same:
        shown = ", ".join(same[:_SHOWN])
        found = f"{teacher} and {student} have different tokenizers: {shown} (differing ids: {len(same)})"
        return f"{found}; use a teacher with the student's tokenizer"
    if size is None or needed is None or size == needed or (same is not None and size > needed):
        return None
    return f"{teacher} has a vocabulary of {size} tokens and {student} one of {needed}; use a teacher with the student's vocabulary"


def _differing(first: Path, second: Path) -> list[str] | None:
    """Return a text for each id whose tokens differ, such as `7 is 'a' and 'b'`; None if a file is missing."""
    if not (first.is_file() and second.is_file()):
        return None
    texts = first.read_bytes(), second.read_bytes()
    if texts[0] == texts[1]:
        return []
    mine, theirs = (_tokens(json.loads(text)) for text in texts)
    return [
        f"{number} is {mine.get(number)!r} and {theirs.get(number)!r}"
        for number in sorted(mine.keys() | theirs.keys())
        if mine.get(number) != theirs.get(number)
    ]


def _tokens(tokenizer: dict[str, Any]) -> dict[int, str]:
    """Return the tokens by id. A unigram model lists (token, score); other models map tokens to ids."""
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    known = {i: entry[0] for i, entry in enumerate(vocabulary)} if isinstance(vocabulary, list) else {i: t for t, i in vocabulary.items()}
    return known | {token["id"]: token["content"] for token in tokenizer.get("added_tokens") or []}


_EXPERTS = ".experts."


def weight_problems(config: Config) -> Iterator[str]:
    """Yield the problems of all weights that a run would load."""
    for check in (_weights, _drafts, _remote_code, _value_model, _teacher, _resume, adapter_problems):
        yield from check(config)


def evaluated_weight_problems(config: Config) -> Iterator[str]:
    """Yield the problems of the weights that `fuligo eval` would load."""
    for check in (_served, _drafts, adapter_problems, _remote_code):
        yield from check(config)


def _weights(config: Config) -> Iterator[str]:
    given = {"--hf-checkpoint": config.model.hf_checkpoint, "--ref-load": config.checkpoint.ref_load}
    sound: dict[str, Path] = {}
    for option, path in given.items():
        if path is None:
            continue
        problems = list(_first_weights(config, option, Path(path)))
        yield from problems
        if not problems:
            sound[option] = model_directory(weights_directory(Path(path)))
    if len(sound) == len(given) and (difference := architecture_difference(*sound.values())) is not None:
        yield f"--ref-load: {difference}; use weights of one architecture"
    first = "--hf-checkpoint" if config.checkpoint.ref_load is None else "--ref-load"
    if first in sound and not is_trainable(sound[first]):
        yield f"{first} {sound[first]} is quantized, and training cannot start from it; use the unquantized weights with --ref-load"
    elif first in sound:
        yield from _mtp_layer(config, first, sound[first])
    if "--hf-checkpoint" in sound and config.syncs_quantized:
        try:
            EngineQuantization.read(sound["--hf-checkpoint"])
        except ConfigError as error:
            yield f"--hf-checkpoint: {error}"
        yield from _renamed_experts(config, sound["--hf-checkpoint"])


def _mtp_layer(config: Config, option: str, directory: Path) -> Iterator[str]:
    """Yield a problem if the initial weights lack the MTP layer that the torch trainer would load, or the trainer cannot train it."""
    wanted = config.train.mtp_num_layers
    if not wanted or not config.trains or config.trainer_capabilities.splits_model:
        return
    if wanted > 1:
        yield f"--mtp-num-layers {wanted}: the torch trainer loads one MTP layer; use 1"
    if not any(map(_is_mtp, read_shapes(directory))):
        yield f"--mtp-num-layers {wanted}: {option} {directory} has no MTP layer (no tensors {MTP_PREFIX}*); remove the flag"
    elif has_mtp_module(read_config_json(directory)):
        from fuligo.models.mtp import mtp_problem

        try:
            problem = mtp_problem(directory)
        except (OSError, ValueError, KeyError):
            return  # the checks of the model report it
        if problem is not None:
            yield f"{option}: {problem}"


def _drafts(config: Config) -> Iterator[str]:
    """Yield a problem for each model whose engines draft with an MTP layer that its files lack.

    SGLang would start anyway and draft with uninitialized weights.
    """
    if config.train.mtp_num_layers:
        return  # the trainer sends the layer
    drafting = {group.model_path for group in engine_groups(config) if group.drafts_with_own_layers and group.model_path is not None}
    for directory in sorted(map(Path, drafting)):
        try:
            has_layer = not has_mtp_module(read_config_json(directory)) or any(map(_is_mtp, read_shapes(directory)))
        except DamagedFileError:
            continue  # the checks of the model report it
        if not has_layer:
            yield (
                f"--sglang-speculative-algorithm: {directory} has no MTP layer to draft with (no tensors {MTP_PREFIX}*; transformers "
                "leaves them out when it saves a model); use a checkpoint with the layer or a draft model, or remove the flag"
            )


def _is_mtp(name: str) -> bool:
    return name.startswith(MTP_PREFIX)


def _renamed_experts(config: Config, directory: Path) -> Iterator[str]:
    """Yield a problem if the engines' files name the experts differently from the tensors that the trainer sends.

    SGLang skips tensors that it does not know, so it would sample with old weights.
    """
    model_type = read_model_config(directory).get("model_type")
    if config.trainer_capabilities.keeps_published_names or not config.trains or model_type in FAMILIES:
        return
    from fuligo.models.adapter import empty_model

    try:
        names = empty_model(directory).state_dict()
    except (OSError, ValueError, KeyError):
        return  # the checks of the model report it
    sent = sorted({name.partition(_EXPERTS)[0] + _EXPERTS for name in names if _EXPERTS in name})
    held = read_shapes(directory)
    if lacking := [prefix for prefix in sent if not any(name.startswith(prefix) for name in held)]:
        yield (
            f"--rollout-backend sglang: the files of {directory} ({model_type}) have no tensors {lacking[0]}*, and SGLang would skip what "
            "the torch trainer sends under this name; use --rollout-backend embedded, or another model"
        )


def _first_weights(config: Config, option: str, path: Path) -> Iterator[str]:
    try:
        directory = path if option == "--hf-checkpoint" else weights_directory(path)
    except CheckpointError as error:
        yield f"{option}: {error}"
        return
    adapter = adapter_directory(directory)
    if is_adapter(adapter) and not (directory / "config.json").is_file():
        yield (
            f"{option} {directory} is a LoRA adapter without its model; start from it with --lora-adapter {adapter}, or merge it into its "
            f"model: fuligo convert merge-adapter {adapter} --save DIR"
        )
    elif is_distributed(directory) and option != "--hf-checkpoint":
        yield from _distributed(config, option, directory)
    else:
        yield from (f"{option}: {text}" for text in checkpoint_problems(directory))


def _distributed(config: Config, option: str, directory: Path) -> Iterator[str]:
    if not config.trainer_capabilities.loads_distributed:
        yield (
            f"{option} {directory} is a distributed checkpoint, which the Megatron trainer reads and the torch trainer does not; "
            f"make a Hugging Face directory of it: fuligo convert dist-to-hf {directory} --save DIR"
        )
    try:
        read_model_config(model_directory(directory))
    except DamagedFileError as error:
        yield f"{option} {directory} is incomplete, or not a distributed checkpoint written by fuligo: {error}"


def _remote_code(config: Config) -> Iterator[str]:
    """Yield a problem if the model needs the checkpoint's own code, or the tokenizer needs it without --trust-remote-code."""
    if config.model.hf_checkpoint is not None:
        yield from _code_of("--hf-checkpoint", Path(config.model.hf_checkpoint), config)


def _code_of(option: str, directory: Path, config: Config) -> Iterator[str]:
    model_code, tokenizer_code = brings_code(directory / "config.json"), brings_code(directory / "tokenizer_config.json")
    if not model_code and not tokenizer_code:
        return
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from fuligo.models.transformers_types import LOADED_AS

    model_type = read_config_json(directory).get("model_type")
    if model_code and model_type not in CONFIG_MAPPING and model_type not in LOADED_AS:
        yield (
            f"{option} {directory}: transformers has no model type {model_type!r}, and fuligo does not run a checkpoint's model code "
            "(auto_map in its config.json); choose another model"
        )
    elif tokenizer_code and not config.model.trust_remote_code:
        from fuligo.models.directory import load_tokenizer

        try:
            load_tokenizer(directory, runs_its_code=False)
        except ConfigError as error:
            yield from (f"{option}: {text}" for text in error.problems)


def _value_model(config: Config) -> Iterator[str]:
    given = config.checkpoint.critic_load
    if given is None or not config.trains_values:
        return
    try:
        directory = value_weights_directory(Path(given))
    except CheckpointError as error:
        yield f"--critic-load: {error}"
        return
    if is_distributed(directory):
        problems = list(_distributed(config, "--critic-load", directory))
    else:
        problems = [f"--critic-load: {text}" for text in checkpoint_problems(directory, may_be_value_model=True)]
    yield from problems
    if not problems and (difference := _from_policy(config, model_directory(directory))):
        yield f"--critic-load: {difference}; use a value model of the policy's architecture"


def _from_policy(config: Config, weights: Path) -> str | None:
    """Return how the architecture of weights differs from that of --hf-checkpoint; None if equal, or if a config.json is damaged.

    Other checks report the damage.
    """
    try:
        return None if config.model.hf_checkpoint is None else architecture_difference(weights, Path(config.model.hf_checkpoint))
    except DamagedFileError:
        return None


def _teacher(config: Config) -> Iterator[str]:
    """Yield the problems of the teacher (--use-opd) if its files are on this machine."""
    model, load = config.model.hf_checkpoint, config.algorithm.opd_teacher_load
    student = Path(model) if model is not None and (Path(model) / "config.json").is_file() else None
    if config.teacher_from == "trainer" and load is not None:
        yield from _loaded_teacher(config, Path(load), student)
    if config.teacher_from != "engine" or student is None:
        return
    served = next((group.model_path for group in engine_groups(config) if group.model == TEACHER), None)
    if served is None or not (Path(served) / "config.json").is_file():
        return
    if (difference := vocabulary_difference(Path(served), student)) is not None:
        yield f"the model {TEACHER} of --sglang-config: {difference}"


def _loaded_teacher(config: Config, path: Path, student: Path | None) -> Iterator[str]:
    option = "--opd-teacher-load"
    problems = list(_first_weights(config, option, path))
    yield from problems
    if problems or student is None:
        return
    directory = model_directory(weights_directory(path))
    if not is_trainable(directory):
        yield f"{option} {directory} is quantized, which the trainer cannot load; use the unquantized weights"
    swapped = config.trainer_capabilities.swaps_models
    difference = architecture_difference(directory, student) if swapped else vocabulary_difference(directory, student)
    if difference is not None:
        instead = (
            "; the Megatron trainer swaps it with the policy; let an engine serve another teacher (--opd-teacher-url)" if swapped else ""
        )
        yield f"{option}: {difference}{instead}"


def _resume(config: Config) -> Iterator[str]:
    load = config.checkpoint.load
    try:
        start = resolve(Path(load) if load is not None else None, config.checkpoint.ckpt_step)
    except CheckpointError as error:
        yield str(error)
        return
    match start:
        case Checkpoint(directory=directory, iteration=iteration):
            weights = weights_of(directory)
            if is_adapter(weights) != config.uses_adapter:
                yield _other_training(directory, holds_adapter=is_adapter(weights))
                return
            num_rollout = config.data.num_rollout
            if num_rollout is not None and (problem := nothing_left(directory, iteration, num_rollout)):
                yield problem
            begins = config.checkpoint.critic_load is not None or not config.trains_values
            if not begins and not (directory / VALUE_MODEL).is_dir():
                yield no_value_model(directory)
        case WeightsOnly(directory=directory):
            weights = directory
        case None:
            return
    if is_adapter(weights):
        was_distributed = is_distributed(directory)
        if was_distributed != config.trainer_capabilities.loads_distributed:
            saved_by = next(name for name, trainer in TRAINER_CAPABILITIES.items() if trainer.loads_distributed == was_distributed)
            yield f"--load {directory} was saved by the {saved_by} trainer; start from its adapter with --lora-adapter {weights}"
            return
        try:
            AdapterConfig.read(weights)
        except CheckpointError as error:
            yield f"--load: {error}"
        return
    model = model_directory(weights)
    if is_distributed(weights):
        problems = list(_distributed(config, "--load", weights))
    elif isinstance(start, Checkpoint) and config.trainer_capabilities.loads_distributed:
        problems = [
            f"--load {start.directory} was saved by the torch trainer; use --ref-load with its weights, {weights}, to start from them"
        ]
    else:
        problems = [f"--load: {text}" for text in checkpoint_problems(model)]
    if not problems and not is_distributed(weights) and not is_trainable(model):
        problems = [f"--load {model} is quantized, and training cannot start from it; use the unquantized weights"]
    yield from problems
    if not problems and (difference := _from_policy(config, model)):
        yield f"--load: {difference}; name the trained model with --hf-checkpoint"


def _other_training(checkpoint: Path, *, holds_adapter: bool) -> str:
    """Return the problem of a checkpoint that holds an adapter if the run trains all weights, or the reverse."""
    if holds_adapter:
        return f"--load {checkpoint} holds a LoRA adapter, but this run trains all weights; add the --lora-* flags that it was trained with"
    weights = weights_of(checkpoint)
    return f"--load {checkpoint} holds all weights, but this run trains a LoRA adapter; start from them with --ref-load {weights}"


def _served(config: Config) -> Iterator[str]:
    """Yield the problems of the weights to evaluate: those of --load, and the model of --hf-checkpoint."""
    flags, model = config.checkpoint, config.model.hf_checkpoint
    if model is not None:
        yield from (f"--hf-checkpoint: {text}" for text in checkpoint_problems(Path(model)))
    try:
        found = resolve(Path(flags.load) if flags.load is not None else None, flags.ckpt_step)
    except CheckpointError as error:
        yield str(error)
        return
    if found is None and flags.load is not None:
        yield f"--load {flags.load} holds no checkpoint to evaluate; drop the flag to evaluate --hf-checkpoint"
    if found is not None:
        weights = weights_of(found.directory) if isinstance(found, Checkpoint) else found.directory
        if not is_distributed(weights) and not is_adapter(weights):
            yield from _code_of("--load", weights, config)
