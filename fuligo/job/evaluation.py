"""Evaluation of a checkpoint, without training (`fuligo eval`)."""

from __future__ import annotations

import asyncio
import shutil
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from fuligo.checkpoint.location import Checkpoint, WeightsOnly, resolve, weights_of
from fuligo.config import Config
from fuligo.formats.adapter_config import adapter_directory, is_adapter
from fuligo.formats.checkpoint_files import is_distributed
from fuligo.job.engines import launch_engines
from fuligo.job.recorder import LogHooks
from fuligo.job.rollouts import build_eval_only
from fuligo.job.stages import join_cluster
from fuligo.observability.run_directory import RunDirectory
from fuligo.observability.sinks import open_sinks
from fuligo.rollout.evaluate import Evaluation


@dataclass(slots=True, frozen=True)
class EvaluatedWeights:
    """Weights to evaluate."""

    directory: Path
    """Hugging Face directory or distributed checkpoint."""
    num_rollouts: int
    """Rollouts that the checkpoint was trained on; 0 for weights that no run has saved."""

    @classmethod
    def find(cls, config: Config) -> EvaluatedWeights:
        """Find the newest checkpoint of `--load`, or that of `--ckpt-step`; without `--load`, the model of `--hf-checkpoint`."""
        load = config.checkpoint.load
        match resolve(Path(load) if load is not None else None, config.checkpoint.ckpt_step):
            case Checkpoint(directory=directory, iteration=iteration):
                return cls(weights_of(directory), iteration)
            case WeightsOnly(directory=directory):
                return cls(directory, 0)
            case None:
                assert load is None, "validated"
                return cls(config.hf_checkpoint_path, 0)


@dataclass(slots=True, frozen=True)
class Evaluated:
    """Result of an evaluation."""

    run_dir: Path
    weights: EvaluatedWeights
    evaluation: Evaluation
    adapter: Path | None = None
    """Adapter of `--lora-adapter` that the engines applied to the weights; None without one."""


async def evaluate_config(config: Config, run_dir: Path) -> Evaluated:
    """Serve the weights, evaluate every dataset, and send the metrics to the trackers.

    `run_dir` is new or empty; it receives the metrics and every sample, in the format of a run's evaluations. Raises FuligoError if the
    evaluation failed, or a tracker cannot be opened.
    """
    from fuligo.models.directory import load_tokenizer

    weights = EvaluatedWeights.find(config)
    async with AsyncExitStack() as stack:
        directory = RunDirectory.create(run_dir, config, resume=False)
        stack.callback(directory.close)
        sinks = open_sinks(config, directory.path, start=weights.num_rollouts)
        for sink in sinks:
            stack.callback(sink.close)
        served = _served(config, weights.directory, directory.path / "hf", stack)
        served, cluster = await join_cluster(served, [], directory, stack)
        turn = asyncio.Event()
        turn.set()  # there is no trainer
        engines = await launch_engines(served, directory, stack, cluster, turn)
        assert engines is not None, "validated: there is something to evaluate"
        await stack.enter_async_context(engines.watched(are_synced=False))
        assert served.model.hf_checkpoint is not None
        tokenizer = load_tokenizer(served.model.hf_checkpoint, runs_its_code=config.model.trust_remote_code)
        evaluator = build_eval_only(served.served_at(engines.launched.served), engines.group, tokenizer, lambda: 0, stack)
        assert evaluator is not None, "validated: there is something to evaluate"
        with directory.trace.phase("eval", weights.num_rollouts):
            evaluation = await evaluator.evaluate(weights.num_rollouts)
        logged = LogHooks.of(config).evaluation(weights.num_rollouts, evaluation)
        directory.write_evaluation(weights.num_rollouts, evaluation.groups, logged.metrics, reward_keys=evaluation.reward_keys)
        for sink in sinks if logged.tracked else ():
            sink.write({"step": weights.num_rollouts, "time": time.time(), **logged.metrics})
        given = config.lora.lora_adapter
        adapter = None if given is None or is_adapter(weights.directory) else adapter_directory(Path(given))
        return Evaluated(directory.path, weights, evaluation, adapter)


def _served(config: Config, weights: Path, target: Path, stack: AsyncExitStack) -> Config:
    """Return the config with which engines load the weights to evaluate: a model, or a base model with an adapter.

    For engines that apply no adapter, or only adapters that requests name, a merged model is written to `target`. Raises CheckpointError if
    the weights, the adapter or its base model are missing or damaged.
    """
    given = config.lora.lora_adapter
    adapter = weights if is_adapter(weights) else None if given is None else adapter_directory(Path(given))
    if adapter is None:
        model, lora = str(_hugging_face(weights, target, stack)), config.lora
    else:
        base = config.initial_weights_path if is_adapter(weights) else str(weights)
        assert base is not None, "validated"
        lora = config.lora.model_copy(update={"lora_rank": None, "lora_adapter": str(adapter)})
        model = base
        facts = config.engine_capabilities
        if facts.names_adapters or not facts.applies_adapters:
            from fuligo.convert.merge_adapter import merge_adapter

            stack.callback(shutil.rmtree, target, ignore_errors=True)
            merge_adapter(Path(base), adapter, target)
            model, lora = str(target), config.lora.model_copy(update={"lora_rank": None, "lora_adapter": None})
    return config.model_copy(update={"model": config.model.model_copy(update={"hf_checkpoint": model}), "lora": lora})


def _hugging_face(weights: Path, target: Path, stack: AsyncExitStack) -> Path:
    """Return a directory that engines can read: the weights, or a temporary Hugging Face copy of them at `target`."""
    if not is_distributed(weights):
        return weights
    from fuligo.convert.dist_to_hf import dist_to_hf

    stack.callback(shutil.rmtree, target, ignore_errors=True)
    dist_to_hf(weights, target)
    return target
