"""Lookup of a run's model shapes: in its checkpoint, in a given config.json, or in MODEL_ARGS. Imports neither numpy nor torch."""

from dataclasses import replace
from pathlib import Path

from fuligo.config import Config
from fuligo.config.topology import engine_groups
from fuligo.errors import ConfigError
from fuligo.formats.hugging_face import read_config_json
from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.from_flags import architecture_from_flags, overridden
from fuligo.models.registry import architecture_of


def find_architectures(config: Config) -> tuple[Architecture, Architecture]:
    """Return the trainer's model and the engines' model. Raises ConfigError if no source describes the model.

    Their shapes are equal unless `--ref-load` is another Hugging Face directory, or MODEL_ARGS override the trainer's config.json
    (`--override-model-config`). The trainer's model is never quantized.
    """
    trained, served = find_trainer_config_json(config), find_engine_config_json(config)
    if trained is None or served is None:
        architecture = architecture_from_flags(config)
        if architecture is None:
            checkpoint = config.model.hf_checkpoint
            reason = f"--hf-checkpoint {checkpoint} has no config.json on this machine" if checkpoint else "no --hf-checkpoint is given"
            raise ConfigError(
                f"cannot determine the model's shapes: {reason}; to plan without the checkpoint, use --model-config-file with the model's "
                "config.json, or its MODEL_ARGS"
            )
        return architecture, architecture
    values = overridden(trained.values, config) if config.model.override_model_config else trained.values
    trainer = replace(architecture_of(values, trained.source), is_quantized=False, is_mxfp4=False)
    return trainer, architecture_of(served.values, served.source)


def find_teacher_config_json(config: Config) -> ConfigJson | None:
    """Return the config.json of the trainer's teacher (--opd-teacher-load); None if it has none, or the file is not on this machine."""
    return _of_directory(config.algorithm.opd_teacher_load) if config.teacher_from == "trainer" else None


def find_served_architectures(config: Config) -> dict[str, Architecture]:
    """Return the shapes of the models that `--sglang-config` serves from a `model_path` other than `--hf-checkpoint`, by path.

    Models without a config.json on this machine, or of an unknown family, are left out: SGLang serves more families than fuligo trains.
    """
    paths = {group.model_path for group in engine_groups(config) if group.model_path is not None}
    found: dict[str, Architecture] = {}
    for path in sorted(paths - {config.model.hf_checkpoint}):
        try:
            if (given := _of_directory(path)) is not None:
                found[path] = architecture_of(given.values, given.source)
        except ConfigError:
            continue
    return found


def find_trainer_config_json(config: Config) -> ConfigJson | None:
    """Return the trainer's config.json: in `--ref-load`, else in `--hf-checkpoint`, else `--model-config-file`; None if none is here."""
    return _of_directory(config.checkpoint.ref_load) or _of_engines(config)


def find_engine_config_json(config: Config) -> ConfigJson | None:
    """Return the engines' config.json: in `--hf-checkpoint`, else `--model-config-file`, else in `--ref-load`; None if none is here."""
    return _of_engines(config) or _of_directory(config.checkpoint.ref_load)


def _of_engines(config: Config) -> ConfigJson | None:
    given = config.model.model_config_file  # a file or a directory, which must exist
    return _of_directory(config.model.hf_checkpoint) or (ConfigJson(read_config_json(Path(given)), given) if given else None)


def _of_directory(path: str | None) -> ConfigJson | None:
    """Return the directory's config.json, or None if it is not on this machine."""
    file = Path(path) / "config.json" if path else None
    return ConfigJson(read_config_json(file), str(file)) if file and file.is_file() else None
