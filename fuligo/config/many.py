"""Rules on several runs that share trainer and engines (`fuligo train-many`): each run alone, and settings that must be equal."""

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import partial
from itertools import combinations
from pathlib import Path

from fuligo.config import Config
from fuligo.config.flags import flags
from fuligo.config.launcher import chosen_launcher, world_size

SHARED = (
    "device",
    "env",
    "trust_remote_code",
    "precision",
    "rollout_num_gpus",
    "rollout_num_gpus_per_engine",
    "num_gpus_per_node",
    "shared_outputs",
    *(name for name, flag in flags().items() if flag.group == "engine"),
)
"""Flags of the processes that all runs share, including all flags of the engines."""
PATHS_WRITTEN: Mapping[str, Callable[[Config, datetime], str | None]] = {
    "--run-dir": lambda config, started: str(config.run_directory(started)),
    "--save": lambda config, started: config.checkpoint.save or str(config.run_directory(started) / "checkpoints"),
    "--save-hf": lambda config, _: config.checkpoint.save_hf,
    "--save-debug-rollout-data": lambda config, _: config.debug.save_debug_rollout_data,
}
"""Option -> path that a run with this config, started at this time, writes to; None if it writes none."""


def problems_of_many(configs: Mapping[str, Config], started: datetime) -> list[str]:
    """Return why these runs (name -> config) cannot share trainer and engines, one text each.

    `started`: start time, the default name of a run directory.
    """
    if world_size() > 1:
        return ["cannot share a trainer that torchrun started: there is one trainer process; start without torchrun"]
    alone = [f"{name}: {problem}" for name, config in configs.items() for problem in _problems_alone(config)]
    return alone or [*_clashes(configs), *_same_outputs(configs, started)]


def _problems_alone(config: Config) -> Iterator[str]:
    """Yield why a run cannot share its trainer and its engine with any other."""
    cannot = "cannot share trainer and engines:"
    if not config.uses_adapter:
        yield f"{cannot} the run trains all weights; give it an adapter (--lora-rank), or train it alone with fuligo train"
        return
    if config.resolved_train_backend != "torch":
        yield f"{cannot} only the torch trainer holds several adapters; use --train-backend torch"
    if config.lora.lora_base_precision != "full":
        yield f"{cannot} the runs share base weights as they are loaded; drop --lora-base-precision {config.lora.lora_base_precision}"
    if not config.trains:
        yield f"{cannot} --debug-rollout-only trains nothing; start it alone with fuligo train"
        return
    if config.engine.rollout_external_engine_addrs:
        yield f"{cannot} --rollout-external-engine-addrs names its own engines; drop it"
    elif config.takes_turns:
        yield f"{cannot} with --colocate the engines would release their memory while others sample; give them their own GPUs"
    elif config.needs_engine and not config.syncs_adapter:
        yield f"{cannot} merged weights (--lora-sync) would overwrite the base weights of the others; use --lora-sync adapter"
    if config.engine.use_fault_tolerance:
        yield f"{cannot} --use-fault-tolerance would restart an engine for one run; drop it, and repeat the command with --resume"
    if config.num_train_gpus > 1:
        yield f"{cannot} the run has {config.num_train_gpus} trainer ranks; use one (--actor-num-gpus-per-node 1)"
    if chosen_launcher(config) != "local":
        yield f"{cannot} the run would start on Ray; use --launcher local"
    if config.checkpoint.max_restarts:
        yield f"{cannot} --max-restarts {config.checkpoint.max_restarts} replaces the trainer of one run; drop it, and use --resume"


def _clashes(configs: Mapping[str, Config]) -> Iterator[str]:
    """Yield the flags of the shared processes that differ between the first run and another."""
    (first, shared), *others = configs.items()
    # Paths of the base weights are resolved before they are compared. `sglang` and `router` are arguments of the shared engines.
    compared: dict[str, Callable[[Config], object]] = {
        **{flags()[name].option: partial(Config.value_of, name=name) for name in SHARED},
        "--rollout-backend": lambda config: config.resolved_rollout_backend,
        **{flags()[name].option: partial(_path, name=name) for name in ("hf_checkpoint", "ref_load")},
        "--sglang-*": lambda config: dict(config.sglang.items()),
        "--router-*": lambda config: dict(config.router.items()),
    }
    for option, of in compared.items():
        for name, config in others:
            if of(config) != of(shared):
                yield f"{option} is {_shown(of(shared))} in {first} and {_shown(of(config))} in {name}; all runs need the same"


def _path(config: Config, name: str) -> object:
    given = config.value_of(name)
    return Path(given).resolve() if isinstance(given, str) else given


def _shown(value: object) -> str:
    return "not set" if value is None or value == [] else str(value)


def _same_outputs(configs: Mapping[str, Config], started: datetime) -> Iterator[str]:
    """Yield the paths and Hub repositories that two runs would both write to, even if different options name them."""
    for (one, config), (other, compared) in combinations(configs.items(), 2):
        theirs = _paths_written(compared, started)
        for option, written in _paths_written(config, started).items():
            also = next((each for each, path in theirs.items() if Path(path).resolve() == Path(written).resolve()), None)
            if also is None or (option == also == "--save" and config.checkpoint.save is compared.checkpoint.save is None):
                continue  # the default --save is below --run-dir, which is reported instead
            of_other = "" if also == option else f" ({also} of {other})"
            yield f"{one} and {other} would both write to {option} {written}{of_other}; give each run its own path"
        if (hub := config.checkpoint.push_to_hub) is not None and hub == compared.checkpoint.push_to_hub:
            yield f"{one} and {other} would both write to --push-to-hub {hub}; give each run its own repository"


def _paths_written(config: Config, started: datetime) -> dict[str, str]:
    return {option: path for option, of in PATHS_WRITTEN.items() if (path := of(config, started)) is not None}
