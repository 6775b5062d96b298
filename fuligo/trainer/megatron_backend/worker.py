"""Rank worker of the Megatron trainer."""

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor, nn

from fuligo.errors import ConfigError
from fuligo.formats.checkpoint_files import VALUE_MODEL, is_distributed
from fuligo.formats.hugging_face import read_config_json
from fuligo.layout.flops import forward_flops
from fuligo.layout.megatron import Layout
from fuligo.limits import num_cores
from fuligo.models.adapter_names import AdapterNames
from fuligo.models.registry import architecture_of, names_of
from fuligo.quantities import count
from fuligo.trainer.adapter_sender import AdapterSender, base_digest
from fuligo.trainer.megatron_backend.cpu import run_on_cpu
from fuligo.trainer.megatron_backend.critic import Critic
from fuligo.trainer.megatron_backend.gradients import Routing, Row, Scores, compute_gradients, compute_scores, response_logprobs
from fuligo.trainer.megatron_backend.learner import Learner, freeze_parameters, gather_parameters, zero_gradients
from fuligo.trainer.megatron_backend.lora import AdaptedStages, adapter_off, add_adapters, dropout_on, load_adapter
from fuligo.trainer.megatron_backend.model import PolicyModel, build_chunks
from fuligo.trainer.megatron_backend.routing_replay import RecordedPart, assemble
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.megatron_backend.state import CheckpointWriter, MegatronState, SavedAdapter, load_weights, restore_state
from fuligo.trainer.megatron_backend.weights.export import named_weights
from fuligo.trainer.megatron_backend.weights.load import load_hugging_face
from fuligo.trainer.megatron_backend.weights.local import local_weights
from fuligo.trainer.parameters import DTYPES, require_trained_mtp, sync_dtype
from fuligo.trainer.ranks.settings import LoraSettings
from fuligo.trainer.ranks.worker import RankWorker
from fuligo.trainer.ranks.world import World
from fuligo.trainer.shares import SampleScores, ScoreShare, StepShare
from fuligo.trainer.step import StepGradients
from fuligo.types import FloatArray


def join_megatron(layout: Layout, world: World, seed: int, *, timeout_s: float = 1800.0) -> None:
    """Create the process groups of all parallel dimensions within the default process group. A collective.

    Weights that are not loaded from a checkpoint depend only on `seed` and the rank. `timeout_s` is rounded up to minutes. Raises
    ConfigError if the ranks cannot be arranged in this layout.
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
        raise ConfigError(
            f"cannot arrange {count(layout.num_ranks, 'trainer rank')} as {layout}: {error}; change the parallel sizes or "
            "the number of GPUs"
        ) from error
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


class HostWeights:
    """Weights of another model of the same architecture, kept in host memory until they are swapped with the weights on the device."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        pinned = torch.cuda.is_available()
        self.tensors: Mapping[str, Tensor] = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned) for name, tensor in local_weights(chunks).items()
        }
        self.copy_from(chunks)

    @torch.no_grad()
    def copy_from(self, chunks: Sequence[nn.Module]) -> None:
        for name, tensor in local_weights(chunks).items():
            self.tensors[name].copy_(tensor)

    @torch.no_grad()
    def exchange(self, chunks: Sequence[nn.Module]) -> None:
        """Swap these weights with those of the stages. Calling it twice restores both bit for bit."""
        for name, tensor in local_weights(chunks).items():
            present = tensor.clone()
            tensor.copy_(self.tensors[name])
            self.tensors[name].copy_(present)


class MegatronRankWorker(RankWorker[MegatronTrainerSettings, Critic, HostWeights]):
    """Worker with this rank's stages of policy and value model, their optimizers and counters; other models are kept in host memory."""

    def __init__(self, settings: MegatronTrainerSettings, world: World) -> None:
        """Load weights and build the optimizers. Raises CheckpointError or ConfigError if files, model, layout and flags do not match."""
        super().__init__(settings, world)
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
            for chunk in chunks:
                if chunk.mtp_process and settings.mtp.enable_mtp_training and not settings.mtp.mtp_joint_training:
                    require_trained_mtp(chunk.mtp.parameters(), settings.trained)
        else:
            self._saved_adapter = self._add_adapter(chunks, settings.lora)
        if settings.optimizer_place.optimizer_cpu_offload and world.device.type == "cuda":
            # All ranks of a node run their optimizers at the same time.
            torch.set_num_threads(max(1, num_cores() // torch.cuda.device_count()))
        self._learner = Learner(chunks, settings, world)
        self.chunks = self._learner.chunks
        self.critic = None if settings.critic is None else Critic(settings.critic, settings, self.names, world)
        checkpoint_dtype = getattr(torch, config_json.get("dtype") or config_json.get("torch_dtype") or "float32")
        self.export_dtype = sync_dtype(settings, checkpoint_dtype)
        self.balance_by = forward_flops(architecture_of(config_json)).whole_sequence if settings.balance_data else None
        self._writer = CheckpointWriter(world)
        self._adapted, self._adapter_sender = None, None
        if settings.lora is not None and self._saved_adapter is not None:
            self._adapted = AdaptedStages(self.chunks, self.names, self._saved_adapter.names, self.export_dtype, world)
            self._adapter_sender = AdapterSender(self._adapted, self._sender, world, merges=settings.lora.is_merged)

    def gradients(self, step: StepShare) -> StepGradients | None:
        """Compute the gradients of the step's loss in the stages' buffers. Return None except on the rank that reports for its replica."""
        zero_gradients(self.chunks)
        with dropout_on(self.chunks):
            return compute_gradients(self.chunks, step, self.settings, self.world.device)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        if self._adapted is not None:
            return self._adapted.merged()
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
        for module in (module for learner in self._learners() for chunk in learner.chunks for module in chunk.modules()):
            getattr(module, "_fp8_workspaces", {}).clear()  # TransformerEngine's FP8 copies of weights; the next pass makes new ones
        super().offload()

    def close(self) -> None:
        parallel_state.destroy_model_parallel()

    def _load(self, chunks: list[PolicyModel], directory: Path) -> None:
        if is_distributed(directory):
            load_weights(directory, chunks, self.names, self.world)
        else:
            load_hugging_face(chunks, directory)

    def _add_adapter(self, chunks: list[PolicyModel], lora: LoraSettings) -> SavedAdapter:
        """Add the adapter to the policy and freeze the policy's weights.

        Raises ConfigError if the model does not support it, and CheckpointError if the initial adapter is damaged or does not fit the
        model.
        """
        names = AdapterNames.of(self.names, lora.adapter, num_tensor_ranks=self.settings.layout.tp)
        digest = base_digest(named_weights(chunks, self.names, dtype=DTYPES[self.settings.precision]))
        add_adapters(chunks, names, seed=self.settings.seed)
        if lora.initial_adapter is not None:
            load_adapter(chunks, names, lora.initial_adapter)
        return SavedAdapter(names, digest)

    def _load_to_host(self, chunks: list[PolicyModel], directory: Path | None) -> HostWeights | None:
        """Load the weights of a reference or teacher model into the stages, and return a copy of them in host memory;
        None without a `directory`."""
        if directory is None:
            return None
        self._load(chunks, directory)
        return HostWeights(chunks)

    def _scores(self, share: ScoreShare, *, routing: Routing) -> Scores:
        def logprobs_of(chunk: nn.Module, row: Row, hidden: Tensor) -> Tensor:
            return response_logprobs(chunk, row, hidden, self.settings).logprobs

        return compute_scores(self.chunks, share, self.settings, self.world.device, logprobs_of, routing=routing)

    def _with_routing(self, scores: list[SampleScores], parts_of_ranks: Sequence[Mapping[int, RecordedPart]]) -> list[SampleScores]:
        if not any(parts_of_ranks):
            return scores
        shape = self.settings.routing
        assert shape is not None
        parts_of = [[parts[i] for parts in parts_of_ranks if i in parts] for i in range(len(scores))]
        return [replace(of_sample, routed_experts=assemble(parts, shape)) for of_sample, parts in zip(scores, parts_of, strict=True)]

    def _policy_logprobs(self, share: ScoreShare) -> dict[int, FloatArray]:
        return self._scores(share, routing="own").of_tokens

    def _old_logprobs(self, share: ScoreShare) -> tuple[dict[int, FloatArray], Mapping[int, RecordedPart]]:
        old = self._scores(share, routing="recorded" if self.settings.records_routing else "replayed")
        return old.of_tokens, old.routing

    def _logprobs_of(self, model: HostWeights, share: ScoreShare) -> dict[int, FloatArray]:
        """Return the log-probabilities of a reference or teacher model, without routing replay."""
        model.exchange(self.chunks)
        try:
            with self._adapter_off():
                return self._policy_logprobs(share)
        finally:
            model.exchange(self.chunks)

    def _adapter_off(self) -> AbstractContextManager[None]:
        return adapter_off(self.chunks)

    def _optimizer_steps(self, step: StepShare) -> tuple[list[StepGradients | None], dict[str, float]]:
        found = super()._optimizer_steps(step)
        if self.settings.optimizer_place.optimizer_cpu_offload and self.world.device.type == "cuda":
            torch.cuda.empty_cache()  # without this, the cache grew by 20 GiB per step
        return found

    def _end_rollout(self) -> None:
        gather_parameters(self.chunks)
        super()._end_rollout()

    def _update_reference(self, reference: HostWeights) -> None:
        reference.copy_from(self.chunks)

    def _kept_tensors(self) -> list[Tensor]:
        return [tensor for learner in self._learners() for tensor in learner.tensors()]

    def _dropped_tensors(self) -> list[Tensor]:
        return [tensor for learner in self._learners() for tensor in learner.gradient_buffers()]

    def _states(self, directory: Path) -> dict[Path, MegatronState]:
        """Return the states by directory: the checkpoint of the value model is a subdirectory of the policy's."""
        learner, reference = self._learner, self._changed_reference
        tensors = None if reference is None else reference.tensors
        states = {
            directory: MegatronState(
                learner.chunks, self.names, learner.optimizer, self.settings.layout, learner.progress, tensors, self._saved_adapter
            )
        }
        return states if self.critic is None else states | {directory / VALUE_MODEL: self.critic.state()}
