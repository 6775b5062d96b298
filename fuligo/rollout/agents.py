"""Generation by a user's agent (`--agent`), which talks to the policy through a session of the gateway and returns the reward."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any

from fuligo.config.hooks import Hook, describe_exception, is_async
from fuligo.engines.generation import SamplingParams, Tokenizer
from fuligo.environments.environment import UNKNOWN_TOOL, Row
from fuligo.environments.threads import call_in_thread
from fuligo.gateway.conversation import Turn
from fuligo.gateway.server import Gateway
from fuligo.gateway.session import Reward, Session
from fuligo.quantities import count
from fuligo.rollout.custom_generate import append_observation
from fuligo.rollout.environment_calls import abandon
from fuligo.rollout.generate import STATUS_BY_FINISH_REASON
from fuligo.rollout.sampler import append_tokens, clear_response, failed
from fuligo.types import Episode as RecordedEpisode
from fuligo.types import Sample, SampleStatus
from fuligo.types import Turn as RecordedTurn

Key = tuple[int | None, int]
"""Seed and index of a sample. The seed distinguishes samples of an evaluation from training samples with the same index."""


@dataclass(eq=False)
class Episode:
    """One run of the agent on a sample."""

    session: Session
    task: asyncio.Task[Any]
    left_s: float
    """Seconds left of --agent-timeout-s; time in which the episode is suspended does not count."""
    expiry: asyncio.TimerHandle | None = None
    """Timer that cancels a suspended episode unless it is continued first."""


@dataclass(eq=False)
class AgentGenerate:
    """`GenerateFn` and `Interruptible` that runs the agent once per sample.

    A conversation that the agent rewrites becomes several samples of one index. When generation is aborted, the agent waits at its next
    request and continues when the sample is continued. If `continues` is False, or the sample is not continued within --agent-timeout-s,
    the agent is canceled.
    """

    agent: Hook
    """Function `(session, row) -> reward`, async or plain; each call of a plain one runs in a separate thread."""
    gateway: Gateway
    tokenizer: Tokenizer
    _: KW_ONLY
    timeout_s: float
    continues: bool
    """True if interrupted samples may be continued; otherwise their agents are canceled."""
    _running: set[Episode] = field(default_factory=set, init=False)
    _suspended: dict[Key, Episode] = field(default_factory=dict, init=False)
    _cancelled: set[asyncio.Task[Any]] = field(default_factory=set, init=False)
    """Agents that were canceled and have not ended yet."""

    async def __call__(self, sample: Sample, params: SamplingParams) -> Sample | list[Sample]:
        """Run the agent until it returns or generation is aborted; return a sample per branch, or the aborted or failed sample."""
        key = (params.sampling_seed, sample.index)
        episode = self._suspended.pop(key, None)
        if episode is None:
            clear_response(sample)  # after a resume, its tokens come from an agent that no longer exists
            episode = await self._start(sample, params)
        else:
            assert episode.expiry is not None
            episode.expiry.cancel()
            episode.session.resume()
        self._running.add(episode)
        try:
            has_ended = await self._until_ended_or_interrupted(episode)
        except TimeoutError:
            self._cancel(episode)
            return failed(sample, self._timeout_text(episode))
        except BaseException:
            self._cancel(episode)
            raise
        finally:
            self._running.discard(episode)
        if has_ended:
            return self._finished(sample, episode)
        return self._interrupted(sample, key, episode)

    def interrupt(self) -> None:
        """Suspend all agents at their next request, because generation is being aborted."""
        for episode in self._running:
            episode.session.suspend()

    async def close(self) -> None:
        """Cancel the agents that are suspended, and abandon those that ignore the cancellation."""
        for episode in self._suspended.values():
            self._cancel(episode)
        self._suspended.clear()
        await abandon(self._cancelled, "agent", "--agent")

    async def _start(self, sample: Sample, params: SamplingParams) -> Episode:
        session = await self.gateway.open(params, label=f"{sample.index}", priority=-sample.index)
        row = Row(deepcopy(sample.prompt), deepcopy(sample.label), deepcopy(sample.metadata), sample.index)
        task = asyncio.create_task(_called(self.agent, session, row), name=f"agent {sample.index}")
        # Nothing else retrieves the exception of a canceled agent, and asyncio would log it as never retrieved.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return Episode(session, task, self.timeout_s)

    async def _until_ended_or_interrupted(self, episode: Episode) -> bool:
        """Return True once the agent has ended, False once it is suspended. Raises TimeoutError if neither happens in time."""
        start_s = time.monotonic()
        interrupted = asyncio.create_task(episode.session.interrupted.wait())
        try:
            done, _ = await asyncio.wait((episode.task, interrupted), timeout=episode.left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            interrupted.cancel()
            episode.left_s -= time.monotonic() - start_s
        if not done:
            raise TimeoutError
        return episode.task in done

    def _finished(self, sample: Sample, episode: Episode) -> Sample | list[Sample]:
        session = episode.session
        problem = self._problem(episode)
        self.gateway.end(session)
        samples = branches(sample, session, self.tokenizer)
        record_turns(samples, session)
        if problem is not None:
            return failed(samples[0], problem)
        samples[0].metrics |= call_counts(session) | {
            "agent_turns": len(session.conversation.turns),
            "agent_branches": len(samples),
            "agent_replaced_requests": session.num_replaced,
        }
        for part in samples:
            part.reward = deepcopy(_reward(episode))
        return samples

    def _problem(self, episode: Episode) -> str | None:
        """Return why the samples of an agent that has ended cannot be used, or None."""
        session, task = episode.session, episode.task
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            cause = f"; last error of an engine: {session.failure}" if session.failure else ""
            return f"the agent raised {describe_exception(error, self.agent)}{cause}".replace(session.api_key, "***")
        if session.num_in_flight:
            return f"the agent returned while {session.num_in_flight} of its requests were in flight; it must await their answers"
        if not session.conversation.turns:
            sent = count(session.num_requests, "request")
            return f"the agent returned without an answer from the policy ({sent}); it must use session.base_url"
        if _reward(episode) is None:
            return "the agent returned no reward; return a number or a dict, or send the reward with POST {base_url}/reward"
        return None

    def _interrupted(self, sample: Sample, key: Key, episode: Episode) -> Sample:
        """Return the aborted sample; if it may be continued, with the tokens of its first branch, whose versions tell how stale it is."""
        if self.continues:
            episode.expiry = asyncio.get_running_loop().call_later(self.timeout_s, self._expire, key)
            self._suspended[key] = episode
            branches(sample, episode.session, self.tokenizer)
        else:
            self._cancel(episode)
            clear_response(sample)
        sample.status, sample.finish_reason = SampleStatus.ABORTED, "abort"
        return sample

    def _expire(self, key: Key) -> None:
        if (episode := self._suspended.pop(key, None)) is not None:
            self._cancel(episode)

    def _cancel(self, episode: Episode) -> None:
        self.gateway.end(episode.session)
        if episode.task.cancel():
            self._cancelled.add(episode.task)
            episode.task.add_done_callback(self._cancelled.discard)

    def _timeout_text(self, episode: Episode) -> str:
        session = episode.session
        if session.last_request_s is None:
            sent = "it sent no request"
        else:
            sent = f"it sent {count(session.num_requests, 'request')}, the last {time.monotonic() - session.last_request_s:.1f} s ago"
        return f"the agent did not return within {self.timeout_s:g} s (--agent-timeout-s); {sent}"


def _reward(episode: Episode) -> Reward | None:
    """Return the reward that the agent returned, or the one that it sent over HTTP if it returned None."""
    returned = episode.task.result()
    return episode.session.given_reward if returned is None else returned


async def _called(agent: Hook, session: Session, row: Row) -> Reward | None:
    """Call the agent and return its result. Exceptions that a task cannot hold, or that would end the event loop, become RuntimeError."""
    try:
        if is_async(agent):
            return await agent(session, row)
        # In a daemon thread, so that a hanging agent cannot keep the process alive.
        return await call_in_thread(partial(agent, session, row), f"agent {row.index}")
    except (StopIteration, SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def branches(sample: Sample, session: Session, tokenizer: Tokenizer) -> list[Sample]:
    """Return one sample per branch of a session's conversation: the given sample for the first branch, copies of it for the others.

    A turn that several branches share is trained on only in the first of them; in the others it is context.
    """
    samples: list[Sample] = []
    for path in session.conversation.branches():
        part = sample
        if samples:
            part = Sample(sample.index, sample.group_index, sample.prompt, sample.prompt_ids, sample.label, deepcopy(sample.metadata))
        _write(part, path, tokenizer)
        samples.append(part)
    return samples or [sample]


def _write(sample: Sample, path: list[tuple[Turn, bool]], tokenizer: Tokenizer) -> None:
    """Write the turns of one branch into a sample. `path`: each turn, and whether this branch trains on it."""
    root = path[0][0]
    clear_response(sample)
    sample.prompt, sample.prompt_ids, sample.spans = root.messages[:-1], root.context, []
    for turn, is_trained in path:
        if turn is not root:
            append_observation(sample, turn.context)
        if is_trained:
            sample.spans += [replace(span, first_token=sample.response_length + span.first_token) for span in turn.sampled.spans]
        append_tokens(sample, turn.sampled.ids, turn.sampled.logprobs, turn.sampled.versions, trained=is_trained)
    sample.finish_reason = path[-1][0].sampled.finish_reason
    sample.status = STATUS_BY_FINISH_REASON[sample.finish_reason]
    sample.response = str(tokenizer.decode(sample.response_ids.tolist(), skip_special_tokens=True))


def record_turns(samples: Sequence[Sample], session: Session) -> None:
    """Set `episode` of each sample that `branches` returned to the turns of its branch."""
    for number, (sample, path) in enumerate(zip(samples, session.conversation.branches())):
        turns = [turn for turn, _ in path]
        sample.episode = RecordedEpisode(turns[0].messages[:-1], [], [])
        first_token = 0
        for turn, next_turn in zip_longest(turns, turns[1:]):
            sample.episode.turns.append(_recorded(turn, next_turn, number, first_token))
            first_token += len(turn.sampled.ids) + (0 if next_turn is None else len(next_turn.context))


def call_counts(session: Session) -> dict[str, float]:
    """Return the number of tool calls, in total and by name; tools that no request offered are counted as `UNKNOWN_TOOL`."""
    answers = [turn.messages[-1] for turn in session.conversation.turns]
    names = [call["function"]["name"] for answer in answers for call in answer.get("tool_calls") or ()]
    calls = Counter(name if name in session.offered_tools else UNKNOWN_TOOL for name in names)
    return {"tool_calls": float(calls.total())} | {f"calls/{name}": float(count) for name, count in calls.items()}


def _recorded(turn: Turn, following: Turn | None, sample: int, first_token: int) -> RecordedTurn:
    spans = turn.sampled.spans
    start_s, end_s = (spans[0].start_s, spans[-1].end_s) if spans else (0.0, 0.0)
    asked_s = following.sampled.spans[0].start_s if following and following.sampled.spans else end_s
    return RecordedTurn(
        sample=sample,
        first_token=first_token,
        num_tokens=len(turn.sampled.ids),
        message=turn.messages[-1],
        answers=[] if following is None else following.messages[len(turn.messages) : -1],
        reward=None,
        tools=[],
        generate_s=end_s - start_s,
        step_s=asked_s - end_s,
    )
