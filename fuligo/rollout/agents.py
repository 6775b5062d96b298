"""Generation by a user's agent (`--agent`), which talks to the policy through a session of the gateway and returns the reward."""

import asyncio
import time
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

from fuligo.config.hooks import Hook, describe_exception, is_async
from fuligo.engines.generation import SamplingParams, Tokenizer
from fuligo.environments.environment import Row
from fuligo.environments.threads import call_in_thread
from fuligo.gateway.server import Gateway
from fuligo.gateway.session import Reward, Session
from fuligo.quantities import count
from fuligo.rollout.agent_samples import branches, call_counts, record_turns
from fuligo.rollout.environment_calls import abandon
from fuligo.rollout.sampler import clear_response, failed
from fuligo.types import Sample, SampleStatus

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
    request and continues when the sample is continued; if it never is, the agent is canceled after --agent-timeout-s.
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
        await abandon(self._cancelled, "agents", "--agent")

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
