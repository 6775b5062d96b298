"""GenerateFn that runs episodes: the model and an environment take turns until the environment is done or a limit is reached."""

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from fuligo.engines.generation import SamplingParams, Tokenizer
from fuligo.environments.environment import (
    AssistantTurn,
    Environment,
    Row,
    Step,
    Tool,
    describe_error,
    json_copy,
    start_problem,
    step_problem,
)
from fuligo.environments.isolation.messages import FailureError
from fuligo.environments.load import EnvironmentFactory
from fuligo.environments.rendering import Renderer
from fuligo.errors import DataError
from fuligo.rollout.custom_generate import append_observation
from fuligo.rollout.environment_calls import CallInterruptedError, EpisodeError, abandon, call_within
from fuligo.rollout.generate import SingleTurn
from fuligo.rollout.metrics import is_finite
from fuligo.rollout.protocol import GenerateFn
from fuligo.rollout.sampler import clear_response, failed
from fuligo.types import Branch, Episode, Messages, Sample, SampleStatus, Span, ToolUse, Turn

T = TypeVar("T")
_SEED_STEP = 0x9E3779B97F4A7C15
"""Difference between the sampling seeds of an episode's branches; odd, so that no two of them are equal modulo 2**63."""


@dataclass(slots=True, frozen=True)
class Limits:
    """Limits of an episode."""

    max_turns: int
    turn_timeout_s: float
    """Timeout of each call of the environment."""
    episode_timeout_s: float
    """Timeout of the whole episode; starts again when an interrupted episode continues."""
    max_context_len: int | None
    """Longest prompt + response, in tokens; None: no limit."""


@dataclass(eq=False)
class Episodes:
    """`GenerateFn` and `Interruptible` that creates an environment for every sample and runs the episode.

    Sampled token ids are kept; the chat template renders only the messages between them. Where the template rewrites earlier turns, the
    sample ends, and a new one of the same index begins with the conversation rendered anew.
    """

    generate: GenerateFn
    factory: EnvironmentFactory
    renderer: Renderer
    tokenizer: Tokenizer
    _: KW_ONLY
    limits: Limits
    _running: set[asyncio.Future[None]] = field(default_factory=set, init=False)
    """One future per episode in progress, set to make the episode return aborted."""
    _canceled: set[asyncio.Task[Any]] = field(default_factory=set, init=False)
    """Calls of environments that were canceled and have not ended yet."""

    def __post_init__(self) -> None:
        # Decode the response once, at the end: decoding it after every turn would delay the next request.
        self._writer = self.generate if isinstance(self.generate, SingleTurn) else None
        self.sample_turn: GenerateFn = self.generate if self._writer is None else self._writer.without_text()

    async def __call__(self, sample: Sample, params: SamplingParams) -> list[Sample]:
        """Run an episode until it ends or is interrupted, and return its samples. If the environment fails, the sample is marked failed."""
        samples = await self._episode(sample, params)
        if self._writer is not None and not params.stop:
            sample.response = await self._writer.text(sample)
        return samples

    async def _episode(self, sample: Sample, params: SamplingParams) -> list[Sample]:
        row = Row(sample.prompt, sample.label, deepcopy(sample.metadata), sample.index)
        deadline = asyncio.timeout(self.limits.episode_timeout_s)
        environment: Environment | None = None
        interrupted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running.add(interrupted)
        try:
            async with deadline:
                environment = self._make(row)
                return await _Run(self, environment, sample, params, interrupted).to_end()
        except CallInterruptedError:
            sample.status = SampleStatus.ABORTED
            return [sample]
        except EpisodeError as error:
            return [failed(sample, str(error))]
        except TimeoutError:
            if not deadline.expired():
                raise
            return [failed(sample, f"the episode did not end within {self.limits.episode_timeout_s:g} s (--episode-timeout-s)")]
        finally:
            self._running.discard(interrupted)
            if environment is not None:
                await self._close(environment, sample)

    def interrupt(self) -> None:
        """Cancel the calls of environments, because generation is being aborted; an episode that continues makes its call again."""
        for interrupted in self._running:
            if not interrupted.done():
                interrupted.set_result(None)

    async def close(self) -> None:
        """Abandon calls that ignore their cancellation, so that the run can end, and end the processes of environments."""
        await abandon(self._canceled, "environment call", "--environment")
        await self.factory.close()

    async def call(self, call: Coroutine[Any, Any, T], name: str, interrupted: asyncio.Future[None] | None = None) -> T:
        """Await a call of an environment; see `call_within`."""
        return await call_within(call, name, self.limits.turn_timeout_s, interrupted, self._canceled)

    def _make(self, row: Row) -> Environment:
        try:
            return self.factory.make(row)
        except BaseException as error:
            raise EpisodeError(f"environment: the constructor raised {describe_error(error)}") from error

    async def _close(self, environment: Environment, sample: Sample) -> None:
        try:
            await self.call(environment.close(), "close")
        except EpisodeError as error:
            if sample.status is not SampleStatus.FAILED:
                failed(sample, str(error))


@dataclass(eq=False)
class _Run:
    """One episode in progress."""

    parts: Episodes
    environment: Environment
    sample: Sample
    params: SamplingParams
    interrupted: asyncio.Future[None]
    _tools: tuple[Tool, ...] = ()
    _messages: Messages = field(default_factory=list)

    async def to_end(self) -> list[Sample]:
        """Run the episode and return its samples, or the aborted sample that holds its state."""
        await self._begin()
        sample, episode = self.sample, self._episode
        while True:
            start_s = time.monotonic()
            if not await self._sampled():
                return [sample] if sample.status is SampleStatus.ABORTED else self._finished(SampleStatus.TRUNCATED)
            if sample.status is SampleStatus.FAILED:
                return [sample]
            sampled = sample.response_ids[episode.turn_start :].tolist()
            is_last = sample.finish_reason == "length" or len(episode.turns) + 1 >= self.parts.limits.max_turns
            text = self.parts.renderer.text(sampled)
            before = [*sample.prompt_ids[-16:].tolist(), *sample.response_ids[: episode.turn_start][-16:].tolist()]
            turn = replace(
                self.parts.renderer.parse(sampled, before, self._tools, recorded=True, text=text),
                truncated=sample.finish_reason == "length",
                last=is_last,
            )
            # Until the environment has answered, the sample counts as interrupted: a cancellation here must not make it look finished.
            sample.status = SampleStatus.ABORTED
            step_s, step = await self._step(turn)
            self._record(turn, step, generate_s=step_s - start_s, step_s=time.monotonic() - step_s)
            if step.done:
                return self._finished(SampleStatus.COMPLETED)
            if is_last or not self._continue(sampled, text, step.messages):
                return self._finished(SampleStatus.TRUNCATED)

    @property
    def _episode(self) -> Episode:
        assert self.sample.episode is not None
        return self.sample.episode

    async def _begin(self) -> None:
        """Reset the environment, or restore it if the sample was interrupted and the environment is resumable."""
        sample = self.sample
        if sample.episode is not None and self.environment.resumable:
            await self._within(self.environment.restore(json_copy(sample.episode.state)), "restore")
            self._tools = tuple(Tool(**each["function"]) for each in sample.episode.tools)
            self._messages = [*sample.episode.messages]
            for turn in sample.episode.turns:
                self._messages += [turn.message, *turn.answers]
            return
        clear_response(sample)
        sample.spans.clear()
        sample.episode = None
        start = await self._within(self.environment.reset(), "reset")
        if (problem := start_problem(start)) is not None:
            raise EpisodeError(f"environment: {problem}")
        self._tools = tuple(start.tools)
        self._messages = [*start.messages]
        sample.prompt_ids = np.asarray(self._rendered(), np.int32)
        sample.episode = Episode(_plain(start.messages, "messages"), [_plain(tool.to_json(), "tools") for tool in start.tools])
        self._save_state()

    async def _within(self, call: Coroutine[Any, Any, T], name: str) -> T:
        return await self.parts.call(call, name, self.interrupted)

    async def _sampled(self) -> bool:
        """Sample a turn, or the rest of an interrupted one. Return False if generation was aborted or there is no room for a token."""
        sample, episode = self.sample, self._episode
        answered = sample.response_length > episode.turn_start and sample.finish_reason in ("stop", "length")
        if answered and sample.status is SampleStatus.ABORTED:
            return True  # interrupted before the environment answered
        if self.interrupted.done():
            raise CallInterruptedError
        sample.finish_reason = None
        params, seed = self.params, self.params.sampling_seed
        if seed is not None and episode.branches:
            params = replace(params, sampling_seed=(seed + len(episode.branches) * _SEED_STEP) % 2**63)
        await self.parts.sample_turn(sample, params)
        if sample.status is SampleStatus.FAILED:
            raise EpisodeError(sample.error or "the request failed")
        return sample.status is not SampleStatus.ABORTED and sample.response_length > episode.turn_start

    async def _step(self, turn: AssistantTurn) -> tuple[float, Step]:
        """Call the environment's `step` and check its answer; return the call's start on the monotonic clock [s], and the step."""
        start_s, wall_s = time.monotonic(), time.time()
        step = await self._within(self.environment.step(turn), "step")
        self.sample.spans.append(Span("environment", wall_s, time.time(), first_token=self.sample.response_length))
        if (problem := step_problem(step)) is not None:
            raise EpisodeError(f"environment: {problem}")
        if not step.done and not turn.last and not step.messages:
            raise EpisodeError("environment: step returned no message for the model to answer; return one, or done=True")
        if not is_finite(_number(step.reward)):
            raise EpisodeError(f"environment: the reward of turn {len(self._episode.turns) + 1} is {step.reward!r:.80}; it must be finite")
        return start_s, step

    def _record(self, turn: AssistantTurn, step: Step, *, generate_s: float, step_s: float) -> None:
        episode = self._episode
        tools = [ToolUse(result.name, result.text, result.failed, result.seconds) for result in step.tool_results]
        message, answers = turn.message(), [*step.messages]
        episode.turns.append(
            Turn(
                sample=len(episode.branches),
                first_token=episode.turn_start,
                num_tokens=turn.num_tokens,
                message=_plain(message, "the turn"),
                answers=_plain(answers, "messages"),
                reward=float(step.reward),
                tools=tools,
                generate_s=generate_s,
                step_s=step_s,
            )
        )
        episode.metrics |= {name: float(value) for name, value in step.metrics.items()}
        episode.metrics["tool_problems"] = episode.metrics.get("tool_problems", 0.0) + len(turn.problems)
        self._messages = [*self._messages, message]

    def _continue(self, sampled: list[int], text: str, new: Messages) -> bool:
        """Append the environment's messages to this sample or begin a new one with them. Return False if no token fits after them."""
        sample, episode = self.sample, self._episode
        try:
            more = self.parts.renderer.extension(self._messages, self._tools, sampled, new, text=text)
        except DataError as error:
            raise EpisodeError(f"environment: {error}") from error
        self._messages = [*self._messages, *new]
        if more is not None:
            if not self._fits(len(sample.tokens) + len(more), sample.response_length + len(more)):
                return False
            append_observation(sample, more)
        else:
            prompt = self._rendered()
            if not self._fits(len(prompt), 0):
                return False
            arrays = (sample.prompt_ids, sample.response_ids, sample.loss_mask, sample.engine_logprobs, sample.versions)
            episode.branches.append(Branch(*arrays, sample.routed_experts))
            clear_response(sample)
            sample.prompt_ids = np.asarray(prompt, np.int32)
        episode.turn_start = sample.response_length
        self._save_state()
        return True

    def _fits(self, num_tokens: int, num_response_tokens: int) -> bool:
        limit = self.parts.limits.max_context_len
        return num_response_tokens < self.params.max_new_tokens and (limit is None or num_tokens < limit)

    def _rendered(self) -> list[int]:
        try:
            return self.parts.renderer.prompt(self._messages, self._tools)
        except DataError as error:
            raise EpisodeError(f"environment: {error}") from error

    def _save_state(self) -> None:
        if self.environment.resumable:
            try:
                self._episode.state = json_copy(self.environment.state())
            except FailureError as failure:
                raise EpisodeError(f"environment: {failure}") from failure
            except BaseException as error:
                raise EpisodeError(f"environment: state raised {describe_error(error)}") from error

    def _finished(self, status: SampleStatus) -> list[Sample]:
        """Return the samples of the finished episode. They share its reward; the last one holds its metrics and turns."""
        sample, episode = self.sample, self._episode
        sample.status, sample.finish_reason = status, "stop" if status is SampleStatus.COMPLETED else "length"
        sample.reward = float(sum(turn.reward or 0.0 for turn in episode.turns))
        branches = [
            replace(
                self.sample,
                metadata=deepcopy(self.sample.metadata),
                prompt_ids=branch.prompt_ids,
                response_ids=branch.response_ids,
                loss_mask=branch.loss_mask,
                engine_logprobs=branch.engine_logprobs,
                versions=branch.versions,
                routed_experts=branch.routed_experts,
                response=self.parts.tokenizer.decode(branch.response_ids.tolist(), skip_special_tokens=True),
                status=SampleStatus.COMPLETED,
                finish_reason="stop",
                metrics={},
                spans=[],
                episode=None,
            )
            for branch in episode.branches
        ]
        sample.metrics |= _metrics(episode, [*branches, sample])
        episode.branches, episode.state = [], None
        return [*branches, sample]


def _metrics(episode: Episode, samples: Sequence[Sample]) -> dict[str, float]:
    """Return the metrics of an episode, which are logged as `rollout/sample/*`."""
    uses = [use for turn in episode.turns for use in turn.tools]
    calls, failures = Counter(use.name for use in uses), Counter(use.name for use in uses if use.failed)
    num_sampled = sum(turn.num_tokens for turn in episode.turns)
    num_response = sum(sample.response_length for sample in samples)
    metrics = {
        "turns": float(len(episode.turns)),
        "branches": float(len(samples)),
        "tool_calls": float(len(uses)),
        "tool_failures": float(failures.total()),
        "tokens_model": float(num_sampled),
        "tokens_environment": float(num_response - num_sampled),
        "environment_s": sum(turn.step_s for turn in episode.turns),
    }
    metrics |= {f"calls/{name}": float(count) for name, count in calls.items()}
    metrics |= {f"failures/{name}": float(count) for name, count in failures.items()}
    return metrics | episode.metrics


def _number(reward: Any) -> object:
    """Return the number in a scalar array or tensor, anything else as it is."""
    try:
        return reward.item() if hasattr(reward, "item") else reward
    except (ValueError, RuntimeError):  # an array or tensor of several numbers
        return reward


def _plain(value: Any, name: str) -> Any:
    """Copy JSON data that the sample keeps. Raises EpisodeError if it is not JSON data."""
    try:
        return json_copy(value)
    except TypeError as error:
        raise EpisodeError(f"environment: {name} must be JSON data ({error})") from error
