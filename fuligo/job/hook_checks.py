"""Contract tests of hooks: each is called as in a run, with made-up samples, and its results are checked. Neither model nor GPU is needed.

The tests of a loss, its reducer and its TIS weights also check that micro-batches add up and that masked tokens have no gradient, which a
run would not notice.
"""

import asyncio
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from fuligo.algorithms.assign import assign_advantages
from fuligo.algorithms.settings import AdvantageSettings
from fuligo.config import Config
from fuligo.config.args_view import ArgsView
from fuligo.config.flags import flags
from fuligo.config.hook_specs import given_hooks
from fuligo.config.hooks import Hook, load_hook
from fuligo.engines.generation import SamplingParams
from fuligo.environments import AssistantTurn, Row, Start, Step
from fuligo.environments.environment import json_copy
from fuligo.environments.isolation.factory import environment_factory
from fuligo.errors import FuligoError, HookError
from fuligo.job.recorder import log_data
from fuligo.rollout.custom_generate import CustomGenerate
from fuligo.rollout.evaluate import Evaluation
from fuligo.rollout.filters import all_samples, buffer_filter, group_filter, sample_filter
from fuligo.rollout.protocol import Draw, RolloutState
from fuligo.rollout.rewards import CustomReward, RewardRunner
from fuligo.rollout.sampler import malformation
from fuligo.rollout.source import START_ROLLOUT_ID, DataSource, new_group
from fuligo.trainer.objective import LossInputs, LossSettings, objective
from fuligo.trainer.samples import BeforeTrainStep, DataPostProcess, SampleSettings, train_samples
from fuligo.types import Prompt, Sample, SampleGroup, SampleStatus, TrainSample

CALLED_IN_A_RUN_ALONE = (
    "agent",
    "data_source_path",
    "rollout_function_path",
    "eval_function_path",
    "custom_model_provider_path",
    "sink_path",
)
"""Hooks that need engines, data or Megatron: only their signature is checked."""
_LENGTHS = (5, 1, 9, 4)


def check_hooks(config: Config, prompts: list[Prompt] | None = None) -> dict[str, str | None]:
    """Check all hooks of a config.

    Returns:
        Problem of each hook by `--flag path`; None for a hook without one.
    """
    results: dict[str, str | None] = {}
    for name, path in given_hooks(config):
        try:
            check_hook(name, path, config, prompts)
            results[f"{flags()[name].option} {path}"] = None
        except FuligoError as error:
            results[f"{flags()[name].option} {path}"] = str(error).removeprefix(f"{flags()[name].option} {path}: ")
    return results


def check_hook(flag_name: str, hook: Hook | str, config: Config | None = None, prompts: list[Prompt] | None = None) -> None:
    """Check one hook. Raises FuligoError if the hook does not do what a run expects of it.

    Args:
        flag_name: its flag with underscores, such as `custom_loss_function_path`.
        hook: the function, or its path.
        config: configuration that `args` shows; None: default flags.
        prompts: prompts of the samples, with label and metadata; None: made-up ones.
    """
    config = config or Config()
    function = load_hook(flag_name, hook) if isinstance(hook, str) else hook
    check = _CHECKS.get(flag_name)
    if check is None:
        return
    torch.manual_seed(0)
    try:
        check(
            function,
            config,
            _groups(prompts or [Prompt(i, f"What is {i} + 1?", np.arange(4, dtype=np.int32), str(i + 1), {}) for i in (0, 1)]),
        )
    except FuligoError:
        raise
    except Exception as error:
        raise HookError(f"cannot use {flags()[flag_name].option}: {type(error).__name__}: {error}") from error


def _groups(prompts: list[Prompt]) -> list[SampleGroup]:
    """Return four judged samples for each prompt: three complete, one of them a single token, and one truncated and partly masked."""
    groups = []
    for number, prompt in enumerate(prompts):
        group = new_group(prompt, number, len(_LENGTHS))
        for offset, (length, sample) in enumerate(zip(_LENGTHS, group.samples, strict=True)):
            sample.metadata[START_ROLLOUT_ID] = 0
            sample.response_ids = np.arange(length, dtype=np.int32)
            sample.engine_logprobs = np.linspace(-2, -0.1, length, dtype=np.float32)
            sample.loss_mask, sample.versions = np.ones(length, np.int8), np.zeros(length, np.int32)
            sample.response = f"{prompt.label}" if offset == 0 else "I do not know. " * offset
            sample.status, sample.reward = SampleStatus.COMPLETED, float(offset == 0)
        group.samples[2].status = SampleStatus.TRUNCATED
        group.samples[2].loss_mask[3:5] = 0
        groups.append(group)
    return groups


def _scored(groups: list[SampleGroup]) -> list[TrainSample]:
    samples = train_samples(groups, SampleSettings())
    for sample in samples:
        sample.old_logprobs, sample.ref_logprobs = sample.engine_logprobs + 0.01, sample.engine_logprobs - 0.01
    return samples


def _reward(hook: Hook, config: Config, groups: list[SampleGroup]) -> None:
    for group in groups:
        for sample in group.samples:
            sample.reward = None

    async def judge() -> None:
        async with RewardRunner(config.reward, CustomReward(hook, ArgsView(config), config.reward.rm_timeout_s)) as runner:
            for group in groups:
                await runner(group)

    asyncio.run(judge())
    failed = next((s for group in groups for s in group.samples if s.status is SampleStatus.FAILED), None)
    if failed is not None:
        raise HookError(f"{failed.error} (response {failed.response[:40]!r}, label {failed.label!r:.40})")


def _generate(hook: Hook, config: Config, groups: list[SampleGroup]) -> None:
    async def engine(sample: Sample, params: SamplingParams) -> Sample:
        """Append three tokens and complete the sample."""
        more = np.arange(3, dtype=np.int32)
        sample.response_ids = np.concatenate([sample.response_ids, more])
        sample.engine_logprobs = np.concatenate([sample.engine_logprobs, np.full(3, -0.5, np.float32)])
        sample.loss_mask = np.concatenate([sample.loss_mask, np.ones(3, np.int8)])
        sample.versions = np.concatenate([sample.versions, np.zeros(3, np.int32)])
        sample.response, sample.status, sample.finish_reason = sample.response + " 42", SampleStatus.COMPLETED, "stop"
        return sample

    given = groups[0].samples[0]
    pending = Sample(0, 0, given.prompt, given.prompt_ids, given.label, given.metadata, images=given.images)
    call = CustomGenerate(hook, ArgsView(config), engine, lambda: 0)
    for sample in asyncio.run(call(pending, SamplingParams(max_new_tokens=config.rollout.rollout_max_response_len))):
        if (problem := malformation(sample)) is not None:
            raise HookError(f"--custom-generate-function-path returned a sample with a {problem}")
        if sample.status is SampleStatus.PENDING:
            raise HookError("--custom-generate-function-path returned a sample whose status is pending; set it to completed or truncated")


def _advantages(hook: Hook, config: Config, groups: list[SampleGroup]) -> None:
    samples = _scored(groups)
    assign_advantages(samples, AdvantageSettings(samples_per_step=len(samples), custom=partial(hook, ArgsView(config))))


def _before_train_step(hook: Hook, config: Config, groups: list[SampleGroup]) -> None:
    samples = _scored(groups)
    BeforeTrainStep(partial(hook, ArgsView(config)), 1)(0, assign_advantages(samples, AdvantageSettings(samples_per_step=len(samples))))


def _all_samples(hook: Hook, config: Config, groups: list[SampleGroup]) -> None:
    groups[1].kept, groups[1].drop_reason = False, "check"
    all_samples(hook, ArgsView(config))(groups, DataSource(_NoPrompts(), 0, 0, groups))


class _NoPrompts:
    """`GroupStream` without prompts, which takes groups back."""

    def draw(self, num_groups: int, step: int, policy_version: int) -> Draw:
        return Draw([])

    def put_back(self, groups: list[SampleGroup]) -> None: ...

    def state(self, step: int) -> RolloutState:
        return RolloutState({})

    def restore(self, state: RolloutState) -> None: ...


def _adds_up(option: str, settings: LossSettings) -> None:
    """Check that the losses of two micro-batches add up to the loss of both as one, and that masked tokens have no gradient.

    Raises HookError if not, or if the loss or its gradient is not finite.
    """
    bounds = [0, *accumulate(_LENGTHS)]
    whole = _inputs(range(len(_LENGTHS)))
    result = objective(whole, settings).loss
    (gradient,) = torch.autograd.grad(result, whole.logprobs)
    if not gradient.isfinite().all() or not result.isfinite():
        raise HookError(f"{option}: the loss {result.item():g} or its gradient is not finite; avoid divisions by zero and logarithms of 0")
    if gradient[whole.loss_mask == 0].any():
        raise HookError(f"{option}: tokens with loss_mask 0 have a gradient; multiply by batch.weights, which is 0 there")
    parts = [_inputs([0, 1]), _inputs([2, 3])]
    total = sum(objective(part, settings).loss.item() for part in parts)
    if abs(total - result.item()) > 1e-4 * max(1.0, abs(result.item())):
        raise HookError(
            f"{option}: the loss of {bounds[-1]} response tokens is {result.item():g} as one micro-batch, but {total:g} as the sum of two; "
            "it must not depend on the split; use (batch.weights * x).sum() instead of a mean"
        )


def _inputs(chosen: range | list[int]) -> LossInputs:
    """Return the loss inputs of the chosen responses; a response has the same numbers in every selection."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(_LENGTHS)
    columns = {name: torch.randn(num_tokens, generator=generator) for name in ("advantages", "old", "engine", "new", "ref")}
    mask = torch.ones(num_tokens)
    mask[8:10] = 0
    owners = torch.repeat_interleave(torch.arange(len(_LENGTHS)), torch.tensor(_LENGTHS))
    weights = mask / (torch.zeros(len(_LENGTHS)).index_add(0, owners, mask)[owners] * len(_LENGTHS))
    rows = torch.isin(owners, torch.tensor(list(chosen)))
    near = {name: -1 + 0.1 * columns[name][rows] for name in ("old", "engine", "new", "ref")}
    return LossInputs(
        logprobs=near["new"].requires_grad_(),
        entropy=torch.ones(int(rows.sum())),
        advantages=columns["advantages"][rows],
        loss_mask=mask[rows],
        weights=weights[rows],
        sample_ids=owners[rows] - min(chosen),
        num_samples=len(chosen),
        engine_logprobs=near["engine"],
        old_logprobs=near["old"],
        ref_logprobs=near["ref"],
        share=1 / len(_LENGTHS),
        total_lengths=[4 + _LENGTHS[i] for i in chosen],
        response_lengths=[_LENGTHS[i] for i in chosen],
    )


def _buffer_filter(hook: Hook, config: Config, groups: list[SampleGroup]) -> None:
    buffer = [group.samples for group in groups]
    taken = buffer_filter(hook, ArgsView(config))(1, buffer, 1)
    if len(taken) > 1:
        raise HookError(f"--buffer-filter-path returned {len(taken)} groups for num_samples 1; return at most num_samples groups")


def _group_filter(hook: Hook, config: Config, groups: list[SampleGroup]) -> None:
    judge = group_filter(hook, ArgsView(config))
    judge(groups[0].samples)
    for sample in groups[1].samples:
        sample.reward = 0.0
    judge(groups[1].samples)


def _environment(hook: Hook, config: Config, groups: list[SampleGroup]) -> None:
    """Reset an environment, step it with a last turn, and close it."""
    factory = environment_factory(config)

    async def play(sample: Sample) -> None:
        environment = factory.make(Row(sample.prompt, sample.label, deepcopy(sample.metadata), sample.index))
        try:
            start = await environment.reset()
            if not isinstance(start, Start) or not start.messages:
                raise HookError(f"reset must return a Start with messages, not {start!r:.100}")
            if environment.resumable:
                other = factory.make(environment.row)
                await other.restore(json_copy(environment.state()))
                await other.close()
            step = await environment.step(AssistantTurn(sample.response, num_tokens=sample.response_length, last=True))
            if not isinstance(step, Step) or not np.isfinite(step.reward):
                raise HookError(f"step must return a Step with a finite reward, not {step!r:.100}")
        finally:
            await environment.close()

    try:
        for group in groups:
            asyncio.run(asyncio.wait_for(play(group.samples[0]), 2 * config.rollout.turn_timeout_s))
    finally:
        asyncio.run(factory.close())


_CHECKS: dict[str, Callable[[Hook, Config, list[SampleGroup]], Any]] = {
    "custom_rm_path": _reward,
    "extra_rm_path": lambda hook, config, groups: _reward(hook, Config(), groups),
    "custom_generate_function_path": _generate,
    "environment": _environment,
    "dynamic_sampling_filter_path": _group_filter,
    "buffer_filter_path": _buffer_filter,
    "rollout_sample_filter_path": lambda hook, config, groups: sample_filter(hook, ArgsView(config))(groups),
    "rollout_all_samples_process_path": _all_samples,
    "custom_reward_post_process_path": lambda hook, config, groups: train_samples(
        groups, SampleSettings(reward_key=config.reward.reward_key, post_process=partial(hook, ArgsView(config)))
    ),
    "custom_advantage_function_path": _advantages,
    "rollout_data_postprocess_path": lambda hook, config, groups: DataPostProcess(partial(hook, ArgsView(config)))(_scored(groups)),
    "before_train_step_path": _before_train_step,
    "custom_loss_function_path": lambda hook, config, groups: _adds_up(
        "--custom-loss-function-path", LossSettings(loss_type="custom_loss", custom_loss=partial(hook, ArgsView(config)))
    ),
    "custom_tis_function_path": lambda hook, config, groups: _adds_up(
        "--custom-tis-function-path", LossSettings(custom_weights=partial(hook, ArgsView(config)))
    ),
    "custom_pg_loss_reducer_function_path": lambda hook, config, groups: _adds_up(
        "--custom-pg-loss-reducer-function-path", LossSettings(per_token=config.algorithm.calculate_per_token_loss, reducer=hook)
    ),
    "custom_rollout_log_function_path": lambda hook, config, groups: hook(
        0, ArgsView(config), [sample for group in groups for sample in group.samples], {"rollout/reward_mean": 0.25}, 1.0
    ),
    "custom_eval_rollout_log_function_path": lambda hook, config, groups: hook(
        0, ArgsView(config), log_data(Evaluation({}, {"check": groups})), {"eval/check/mean@4": 0.25}
    ),
}
