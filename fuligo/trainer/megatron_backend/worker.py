"""Rank worker of the Megatron trainer: the same calls on all ranks, in the same order, each with the samples of its replica."""

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from fuligo.errors import ConfigError
from fuligo.formats.checkpoint_files import VALUE_MODEL, is_distributed
from fuligo.formats.hugging_face import read_config_json
from fuligo.formats.weight_manifest import Undelivered, WeightManifest, WeightTarget
from fuligo.layout.flops import forward_flops
from fuligo.layout.megatron import Layout
from fuligo.limits import num_cores
from fuligo.models.adapter_names import AdapterNames
from fuligo.models.registry import architecture_of, names_of
from fuligo.trainer.adapter_sender import AdapterSender, base_digest
from fuligo.trainer.host_memory import HostMemory
from fuligo.trainer.megatron_backend.adapted_weights import AdaptedStages, load_adapter
from fuligo.trainer.megatron_backend.cpu import run_on_cpu
from fuligo.trainer.megatron_backend.critic import Critic
from fuligo.trainer.megatron_backend.gradients import Routing, Scores, compute_gradients, compute_scores
from fuligo.trainer.megatron_backend.host_memory import HostWeights, gradient_tensors, state_tensors
from fuligo.trainer.megatron_backend.learner import Learner, freeze_parameters, gather_parameters, zero_gradients
from fuligo.trainer.megatron_backend.lora import adapter_off, add_adapters, dropout_on
from fuligo.trainer.megatron_backend.model import PolicyModel, build_chunks
from fuligo.trainer.megatron_backend.routing_replay import RecordedPart, assemble
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.megatron_backend.state import CheckpointWriter, MegatronState, SavedAdapter, load_weights, restore_state
from fuligo.trainer.megatron_backend.weights.export import named_weights
from fuligo.trainer.megatron_backend.weights.load import load_hugging_face
from fuligo.trainer.metric_sums import MetricSums, mean_of_steps
from fuligo.trainer.parameters import DTYPES, sync_dtype
from fuligo.trainer.profiling import profiled
from fuligo.trainer.ranks.settings import LoraSettings
from fuligo.trainer.ranks.world import World
from fuligo.trainer.shares import SampleScores, ScoreShare, StepShare, join_by_position
from fuligo.trainer.step import StepGradients, total
from fuligo.trainer.timeline import Timeline
from fuligo.types import FloatArray, StepResult, TokenScores
from fuligo.weights.colocated import TrainerRanks
from fuligo.weights.senders import WeightSender


def join_megatron(layout: Layout, world: World, seed: int, *, timeout_s: float = 1800.0) -> None:
    """Form the groups of the parallel dimensions, inside the default process group. A collective.

    Args:
        seed: seed of Megatron's random states; weights that are not read from a checkpoint depend only on it and on the rank's place.
        timeout_s: deadline of every operation of a group, rounded up to minutes.

    Raises:
        ConfigError: the ranks cannot be arranged in this layout.
    """
    assert layout.num_ranks == world.size
    if world.device.type == "cpu":
        run_on_cpu()
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            distributed_timeout_minutes=math.ceil(timeout_s / 60),
            create_gloo_process_groups=False,
        )
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"{layout.num_ranks} trainer ranks cannot be arranged as {layout}: {error}") from error
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def leave_megatron() -> None:
    """Release the groups, so that the process can use another layout; call it before the default process group ends."""
    parallel_state.destroy_model_parallel()


class MegatronRankWorker:
    """This rank's stages of policy and value model, its part of the optimizers, and counters; other models wait in host memory."""

    def __init__(self, settings: MegatronTrainerSettings, world: World) -> None:
        """Load weights and build the optimizers.

        Raises CheckpointError if weights cannot be read and ConfigError if Megatron cannot build the model or arrange the ranks in this
        layout, or the lists of trained parameters do not fit.
        """
        self.settings = settings
        self.world = world
        join_megatron(settings.layout, world, settings.seed, timeout_s=settings.command_timeout_s)
        assert parallel_state.get_data_parallel_rank() == settings.replica_of(world.rank)
        config_json = read_config_json(settings.hf_checkpoint)
        self.names = names_of(config_json, str(settings.hf_checkpoint / "config.json"))
        chunks = build_chunks(settings, trained=True)
        self.reference = self._load_to_host(chunks, settings.reference_weights if settings.lora is None else None)
        self.teacher = self._load_to_host(chunks, settings.teacher_weights)
        self._load(chunks, settings.initial_weights)
        self._saved_adapter = None
        if settings.lora is None:
            freeze_parameters(chunks, list(self.names.weights()), settings.trained)
        else:
            self._saved_adapter = self._add_adapter(chunks, settings.lora)
        if settings.optimizer_place.on_cpu and world.device.type == "cuda":
            torch.set_num_threads(max(1, num_cores() // torch.cuda.device_count()))  # all ranks of a node step at once
        self._learner = Learner(chunks, settings, world)
        self.chunks, self.progress = self._learner.chunks, self._learner.progress
        self.critic = None if settings.critic is None else Critic(settings.critic, settings, self.names, world)
        checkpoint_dtype = getattr(torch, config_json.get("dtype") or config_json.get("torch_dtype") or "float32")
        self.export_dtype = sync_dtype(settings, checkpoint_dtype)
        self.balance_by = forward_flops(architecture_of(config_json)).whole_sequence if settings.balance_data else None
        self._host_memory = HostMemory(world.device)
        self._writer = CheckpointWriter(world)
        self._sender = WeightSender(settings.engine_format, TrainerRanks(world.rank, world.objects))
        self._adapted, self._adapter_sender = None, None
        if settings.lora is not None and self._saved_adapter is not None:
            self._adapted = AdaptedStages(self.chunks, self.names, self._saved_adapter.names, self.export_dtype, world)
            self._adapter_sender = AdapterSender(self._adapted, self._sender, world, merges=settings.lora.is_merged)
        self._timeline = Timeline(world.device)

    def score(self, share: ScoreShare) -> list[SampleScores] | None:
        """Return the scores of all replicas' samples, on rank 0; None on others."""
        with self._timeline.span("score"):
            routing: Routing = "recorded" if self.settings.records_routing else "replayed"
            old = self._scores(share, routing=routing) if self.settings.needs_old_logprobs else Scores()
            olds, refs, teachers = _logprobs(old), self._reference_logprobs(share), self._logprobs_of(self.teacher, share)
            values = self.critic.values(share) if self.critic is not None else {}
        scored = olds.keys() | refs.keys() | teachers.keys() | values.keys()
        own = {i: SampleScores(olds.get(i), refs.get(i), teachers.get(i), values.get(i)) for i in scored}
        gathered = self.world.gather((own, old.routing))
        if gathered is None:
            return None
        return self._with_routing(join_by_position(scores for scores, _ in gathered), [recorded for _, recorded in gathered])

    def logprobs(self, share: ScoreShare) -> list[FloatArray] | None:
        """Return log-probabilities of the current policy for all replicas' samples, on rank 0; None on others."""
        gathered = self.world.gather(_logprobs(self._scores(share, routing="own")))
        return None if gathered is None else join_by_position(gathered)

    def train(self, steps: Sequence[StepShare | None]) -> StepResult:
        """Run the optimizer steps of a rollout. The result is complete on rank 0; other ranks have no metrics.

        Raises:
            TrainerError: a loss or a gradient is not finite; the weights are as they were before that optimizer step.
        """
        started = time.perf_counter()
        found: list[list[StepGradients | None]] = []
        metrics: list[dict[str, float]] = []
        with profiled(self.settings.profile, rollout=self.progress.num_rollouts, rank=self.world.rank, device=self.world.device):
            for step in steps:
                if step is None:  # skipped, but the learning-rate schedule counts it
                    self.progress.num_optimizer_steps += 1
                    continue
                gradients, step_metrics = self._optimizer_steps(step)
                found.append(gradients)
                metrics.append(step_metrics)
                if self.settings.optimizer_place.on_cpu and self.world.device.type == "cuda":
                    torch.cuda.empty_cache()  # otherwise the cache grew by 20 GiB from step to step (docs/benchmarks-gpu.md)
        self.progress.num_rollouts += 1
        gather_parameters(self.chunks)
        if self.critic is not None:
            self.critic.end_rollout()
        interval = self.settings.ref_update_interval
        if self.reference is not None and interval is not None and self.progress.num_rollouts % interval == 0:
            self.reference.copy_from(self.chunks)
        if self.settings.shares_device:
            torch.cuda.empty_cache()  # the engine uses the activations' memory until the next rollout
        on_host = [[_on_host(of_model) for of_model in step if of_model is not None] for step in found]
        gathered = self.world.gather((on_host, self._timeline.take()))
        if gathered is None:
            return StepResult(metrics={}, scores={}, num_tokens=0)
        replicas = [replica for replica, _ in gathered if all(replica)]
        metrics = [{**_means([replica[step] for replica in replicas]), **own} for step, own in enumerate(metrics)]
        num_tokens = sum(step[-1].num_tokens for replica in replicas for step in replica)
        means = {f"train/{name}": value for name, value in mean_of_steps(metrics).items()}
        means["train/tokens_per_s"] = num_tokens / (time.perf_counter() - started)
        if self.settings.shares_prefixes:
            num_shared = sum(step[-1].num_shared_tokens for replica in replicas for step in replica)
            means["train/shared_prefix_share"] = num_shared / max(1, num_tokens)
        scores: dict[int, TokenScores] = {i: score for replica in replicas for step in replica for i, score in step[-1].scores.items()}
        return StepResult(means, scores, num_tokens, rank_spans=[spans for _, spans in gathered])

    def gradients(self, step: StepShare) -> StepGradients | None:
        """Compute the gradient of the step's loss into the stages' buffers; return this replica's results, on the rank that reports."""
        zero_gradients(self.chunks)
        with dropout_on(self.chunks):
            return compute_gradients(self.chunks, step, self.settings, self.world.device)

    def send_weights(self, target: WeightTarget) -> WeightManifest | Undelivered | None:
        """Gather on all ranks; rank 0 sends, and any rank with an engine on its GPU."""
        with self._timeline.span("send"):
            if self._adapter_sender is not None:
                return self._adapter_sender.send(target)
            return self._sender.send(self.named_weights(), target)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face names and full tensors in the data type of `hf_checkpoint`, an adapter merged into them.

        A collective: every rank iterates to the end.
        """
        if self._adapted is not None:
            return self._adapted.merged().named()
        return named_weights(self.chunks, self.names, dtype=self.export_dtype)

    def save(self, directory: Path) -> None:
        self._writer.save(self._states(directory), model_files=self.settings.hf_checkpoint)

    def begin_save(self, directory: Path) -> Future[None]:
        return self._writer.begin(self._states(directory), model_files=self.settings.hf_checkpoint)

    def restore(self, directory: Path) -> None:
        states = self._states(directory)
        if self.critic is not None and not (directory / VALUE_MODEL).is_dir():
            self.critic.begin_at(directory)
            del states[directory / VALUE_MODEL]
        for place, state in states.items():
            restore_state(place, state, self.world)

    def offload(self) -> None:
        """Free the device's memory of everything that training keeps between rollouts."""
        learners = [self._learner, *([] if self.critic is None else [self.critic.learner])]
        kept = [tensor for learner in learners for tensor in state_tensors(learner.chunks, learner.optimizer)]
        dropped = [tensor for learner in learners for tensor in gradient_tensors(learner.chunks)]
        with self._timeline.span("offload"):
            self._host_memory.take(kept, dropped=dropped)
            if self.world.device.type == "cuda":
                torch.cuda.empty_cache()

    def onload(self) -> None:
        with self._timeline.span("onload"):
            self._host_memory.give_back()

    def close(self) -> None:
        leave_megatron()

    def _load(self, chunks: list[PolicyModel], directory: Path) -> None:
        if is_distributed(directory):
            load_weights(directory, chunks, self.names, self.world)
        else:
            load_hugging_face(chunks, directory)

    def _add_adapter(self, chunks: list[PolicyModel], lora: LoraSettings) -> SavedAdapter:
        """Adapt the layers of the policy, which freezes its weights.

        Raises ConfigError if the model cannot be adapted in this way and CheckpointError if the adapter to start from is damaged, or is
        another model's.
        """
        names = AdapterNames.of(self.names, lora.adapter, num_tensor_ranks=self.settings.layout.tp)
        digest = base_digest(named_weights(chunks, self.names, dtype=DTYPES[self.settings.precision]))
        add_adapters(chunks, names, seed=self.settings.seed)
        if lora.initial_adapter is not None:
            load_adapter(chunks, names, lora.initial_adapter)
        return SavedAdapter(names, digest)

    def _load_to_host(self, chunks: list[PolicyModel], directory: Path | None) -> HostWeights | None:
        """Load the weights of another model, which is never trained, through the stages, into host memory."""
        if directory is None:
            return None
        self._load(chunks, directory)
        return HostWeights(chunks)

    def _scores(self, share: ScoreShare, *, routing: Routing) -> Scores:
        return compute_scores(self.chunks, share, self.settings, self.world.device, routing=routing)

    def _with_routing(self, scores: list[SampleScores], parts_of_ranks: list[dict[int, RecordedPart]]) -> list[SampleScores]:
        """Add the routing that the ranks recorded to the scores, if they did."""
        if not any(parts_of_ranks):
            return scores
        shape = self.settings.routing
        assert shape is not None
        parts_of = [[parts[i] for parts in parts_of_ranks if i in parts] for i in range(len(scores))]
        return [replace(of_sample, routed_experts=assemble(parts, shape)) for of_sample, parts in zip(scores, parts_of, strict=True)]

    def _reference_logprobs(self, share: ScoreShare) -> dict[int, FloatArray]:
        """Return the reference's log-probabilities; with LoRA it is the policy without its adapter."""
        if self.settings.lora is None or self.settings.reference_weights is None:
            return self._logprobs_of(self.reference, share)
        with adapter_off(self.chunks):
            return _logprobs(self._scores(share, routing="own"))

    def _logprobs_of(self, other: HostWeights | None, share: ScoreShare) -> dict[int, FloatArray]:
        """Return log-probabilities of the reference or teacher, which route their tokens themselves."""
        if other is None:
            return {}
        other.exchange(self.chunks)
        try:
            with adapter_off(self.chunks):
                return _logprobs(self._scores(share, routing="own"))
        finally:
            other.exchange(self.chunks)

    def _optimizer_steps(self, step: StepShare) -> tuple[list[StepGradients | None], dict[str, float]]:
        """Step the value model, then the policy; return the results of both, the policy's last."""
        num_micro_batches = len(step.schedule.plans)
        found: list[StepGradients | None] = []
        metrics: dict[str, float] = {}
        if self.critic is not None:
            with self._timeline.span("forward, backward"):
                found.append(self.critic.gradients(step))
            with self._timeline.span("optimizer"):
                metrics = self.critic.step(found[-1], num_micro_batches)
            if self.critic.learns_alone:
                return found, metrics
        with self._timeline.span("forward, backward"):
            found.append(self.gradients(step))
        with self._timeline.span("optimizer"):
            lr, grad_norm = self._learner.step(found[-1], num_micro_batches)
        return found, {**metrics, "lr": lr, "grad_norm": grad_norm, "num_micro_batches": float(num_micro_batches)}

    def _states(self, directory: Path) -> dict[Path, MegatronState]:
        """Return the states by directory in the checkpoint: the value model has its own checkpoint inside the policy's."""
        changes = self.reference is not None and self.settings.ref_update_interval is not None
        reference = self.reference.tensors if self.reference is not None and changes else None
        learner = self._learner
        states = {
            directory: MegatronState(
                learner.chunks, self.names, learner.optimizer, self.settings.layout, learner.progress, reference, self._saved_adapter
            )
        }
        return states if self.critic is None else states | {directory / VALUE_MODEL: self.critic.state()}


def _logprobs(scores: Scores) -> dict[int, FloatArray]:
    return {i: of_sample.logprobs for i, of_sample in scores.of_tokens.items()}


def _means(replicas: Sequence[Sequence[StepGradients]]) -> dict[str, float]:
    """Average the metrics of one optimizer step over all replicas, model by model."""
    means: dict[str, float] = {}
    for of_model in zip(*replicas, strict=True):
        means |= total([gradients.sums for gradients in of_model]).means()
    return means


def _on_host(step: StepGradients) -> StepGradients:
    sums: MetricSums = step.sums.reduced(Tensor.cpu, Tensor.cpu)
    return replace(step, sums=sums, losses=step.losses.cpu())
