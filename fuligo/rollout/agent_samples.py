"""Samples and recorded turns of an agent's session."""

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import zip_longest

from fuligo.engines.generation import Tokenizer
from fuligo.environments.environment import UNKNOWN_TOOL
from fuligo.gateway.conversation import Turn
from fuligo.gateway.session import Session
from fuligo.rollout.custom_generate import append_observation
from fuligo.rollout.generate import STATUS_BY_FINISH_REASON
from fuligo.rollout.sampler import append_tokens, clear_response
from fuligo.types import Episode, Sample
from fuligo.types import Turn as RecordedTurn


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
        sample.episode = Episode(turns[0].messages[:-1], [], [])
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
