"""Types that cross the boundaries between stages: prompts -> samples -> train batch -> step result.

Plain dataclasses of numpy arrays, without torch: the rollout side, hooks and the tools that read a run do not need it.
Axes: P prompt tokens, R response tokens, T = P + R.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
MaskArray = NDArray[np.int8]
RoutedExperts = NDArray[np.uint8 | np.uint16]
"""[tokens, M, K] ids of the K experts of each token in each of the M layers with experts."""
Messages = list[dict[str, Any]]
"""Chat messages, each `{"role": ..., "content": ...}`."""
PASS_REWARD = 1.0
"""Smallest reward with which a response passes, for `pass@k` and the pass rates of prompts."""
MAIN_REWARD = "reward_main"
"""Key in `Sample.metrics` of the reward to which the rewards of --extra-rm-path were added."""


class SampleStatus(StrEnum):
    """Status of a sample. `PENDING` and `ABORTED` samples can be continued; the others are final."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(slots=True, frozen=True)
class RawImage:
    """Encoded image, as it was read."""

    source: str
    """Image file, or column and number, for error messages."""
    data: bytes = field(repr=False)
    is_file: bool = False
    """True if it was read from an image file."""


@dataclass(slots=True, frozen=True)
class PromptImage:
    """Image file of a prompt and the position of its tokens. Samples of a prompt share it; pixels are decoded where they are needed."""

    source: str
    """Image file, or column and number, for error messages."""
    data: bytes = field(repr=False)
    """Content of the image file (PNG, JPEG, ...)."""
    digest: str
    """Hash of `data` (BLAKE2b, 16 bytes, hexadecimal); samples and caches recognize an image by it."""
    first_token: int
    """Position of the image's first token in the prompt, or in the whole sequence of supervised data."""
    num_rows: int
    """Rows of the grid of its tokens."""
    num_columns: int

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.num_columns


class PlacedImages(NamedTuple):
    """Token ids of a sequence, including all tokens of its images."""

    ids: IntArray
    origins: NDArray[np.int64]
    """[T] position of each id among the ids that the template wrote."""
    images: tuple[PromptImage, ...]


@dataclass(slots=True, frozen=True)
class Prompt:
    """One row of a dataset, ready for sampling."""

    row: int
    """Row number in the dataset (0-based, after slicing); the same in every epoch."""
    prompt: str | Messages
    """Text, or the chat messages before the template is applied."""
    prompt_ids: IntArray
    """[P] token ids, with the chat template applied if --apply-chat-template is set."""
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    images: tuple[PromptImage, ...] = ()
    """Images, in the order of their tokens."""


@dataclass(slots=True)
class Span:
    """Time interval of a sample or of a trainer rank, for the trace and `fuligo view`."""

    name: str
    """Kind of work: `generate`, `reward`, `environment`, `teacher`, or a name that a hook chose (sample); `score`, `precision noise`,
    `forward, backward`, `optimizer`, `send`, `offload`, `onload` (rank)."""
    start_s: float
    """Seconds since the epoch (`time.time()`)."""
    end_s: float
    engine: int | None = None
    """Number of the engine that answered; None if none did, or if it is unknown."""
    first_token: int = 0
    """First of the tokens that the interval produced: `response_ids[first_token : first_token + num_tokens]`."""
    num_tokens: int = 0


def _empty_ids() -> IntArray:
    return np.empty(0, np.int32)


def _empty_floats() -> FloatArray:
    return np.empty(0, np.float32)


@dataclass(slots=True)
class ToolUse:
    """Call of a tool in a turn, and its outcome."""

    name: str
    result: str
    failed: bool
    seconds: float


@dataclass(slots=True)
class Turn:
    """Turn of an episode: an answer of the model, and the reply of the environment or agent."""

    sample: int
    """Number of the episode's sample that holds the turn, 0-based; a template that rewrites history begins a new one."""
    first_token: int
    """First token of the answer: `response_ids[first_token : first_token + num_tokens]`."""
    num_tokens: int
    message: dict[str, Any]
    """The answer as a chat message, with thinking and tool calls."""
    answers: Messages
    """Messages of the environment or the agent after the answer."""
    reward: float | None
    """Reward of the turn; None for an agent, whose episode is rewarded as a whole."""
    tools: list[ToolUse]
    """Calls that the environment ran; an agent runs its own."""
    generate_s: float
    step_s: float
    """Time of the environment, or of the agent until its next request."""


@dataclass(slots=True)
class Branch:
    """Finished sample of an episode that continues in another sample, because the template rewrites history."""

    prompt_ids: IntArray
    response_ids: IntArray
    loss_mask: MaskArray
    engine_logprobs: FloatArray
    versions: IntArray
    routed_experts: RoutedExperts | None = None


@dataclass(slots=True)
class Episode:
    """Record of an episode in an environment or of an agent. Everything except `branches` is JSON data."""

    messages: Messages
    """First messages, before any turn."""
    tools: list[dict[str, Any]]
    """Tools that the model may call, in the format of OpenAI's API."""
    turns: list[Turn] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    """Earlier samples of an unfinished episode; empty when it is finished, since each of them is then a `Sample`."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Last value of each number that the environment reported."""
    state: Any = None
    """State of the environment after the last turn, from which an interrupted episode continues; None if it cannot."""
    turn_start: int = 0
    """First response token of the turn in progress."""


@dataclass(slots=True)
class Sample:
    """One response to one prompt, with its history.

    Token ids are authoritative; `response` is their decoding, for people and reward functions.
    """

    index: int
    """Number of the response in the run, 0-based; unique, but samples that one response is split into share it."""
    group_index: int
    """Number of the drawn prompt in the run, 0-based; samples of one prompt that are drawn together share it."""
    prompt: str | Messages
    prompt_ids: IntArray
    """[P] token ids of the prompt."""
    label: Any = None
    """Reference answer of the row, of any JSON type."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Object under --metadata-key, `tools` with --tool-key, and data of hooks. `start_rollout_id` is the rollout in which generation
    began."""
    images: tuple[PromptImage, ...] = ()
    """Images of the prompt, in the order of their tokens."""

    response_ids: IntArray = field(default_factory=_empty_ids)
    """[R] sampled token ids, end token included."""
    loss_mask: MaskArray = field(default_factory=lambda: np.empty(0, np.int8))
    """[R] 1 on tokens to train on."""
    engine_logprobs: FloatArray = field(default_factory=_empty_floats)
    """[R] log softmax(logits / temperature) over the full vocabulary, from the engine that sampled the token."""
    versions: IntArray = field(default_factory=_empty_ids)
    """[R] policy_version of the weights that sampled the token."""
    routed_experts: RoutedExperts | None = None
    """[n, M, K] experts of the first n <= T - 1 tokens, chosen by the engine that computed the token first; None without
    --use-rollout-routing-replay. The last sampled token and tokens appended after it have none."""
    teacher_logprobs: FloatArray | None = None
    """[R] log softmax(logits / temperature) of a teacher that an engine serves (--use-opd); None until the sample is finished."""

    status: SampleStatus = SampleStatus.PENDING
    finish_reason: str | None = None
    """Finish reason of the engine (`stop`, `length` or `abort`); None before its first answer."""
    error: str | None = None
    """Cause of the failure of a failed sample; None for other samples."""
    reward: float | dict[str, Any] | None = None
    judge_error: str | None = None
    """Reason why a built-in judge gave no verdict (its time or memory ran out), so that the answer counts as wrong; None
    otherwise."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers that hooks, environments and --extra-rm-path report for this sample, by name; their means are the metrics
    `rollout/sample/<name>`."""
    response: str = ""
    """Text of `response_ids`, all decoded at once."""
    spans: list[Span] = field(default_factory=list)
    episode: Episode | None = None
    """Turns of an episode in an environment (--environment), on its last sample only; with --agent, the agent's turns in this sample.
    None without either."""

    @property
    def tokens(self) -> IntArray:
        """[T] token ids of prompt and response."""
        return np.concatenate([self.prompt_ids, self.response_ids])

    @property
    def response_length(self) -> int:
        """R, the number of response tokens."""
        return len(self.response_ids)

    @property
    def engine(self) -> int | None:
        """Number of the engine that sampled the last tokens (a continued response may have several); None if unknown."""
        return next((span.engine for span in reversed(self.spans) if span.engine is not None), None)

    @property
    def finished(self) -> bool:
        """True if no more tokens will be sampled."""
        return self.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED, SampleStatus.FAILED)

    def reward_value(self, reward_key: str | None = None) -> float:
        """Return the scalar reward: `reward` itself, or `reward[reward_key]` if the reward is a dict.

        Raises ValueError if the sample has no reward, or no value under the key.
        """
        reward = self.reward
        if isinstance(reward, dict):
            if reward_key is None or reward_key not in reward:
                raise ValueError(
                    f"sample {self.index}: the reward is a dict with the keys {sorted(reward)}; "
                    f"--reward-key is {reward_key!r} and must name one of them"
                )
            reward = reward[reward_key]
        if reward is None:
            raise ValueError(f"sample {self.index} ({self.status}) has no reward")
        return float(reward)

    def passes(self, reward_key: str | None = None, pass_key: str | None = None) -> bool:
        """Return whether the reward that evaluations report is at least `PASS_REWARD`.

        That is the number under `pass_key` of a dict reward, otherwise the reward without those of --extra-rm-path.

        Raises:
            ValueError: see `reward_value`
        """
        if isinstance(self.reward, dict) and pass_key is not None and pass_key != reward_key:
            part = self.reward.get(pass_key)
        else:
            part = self.metrics.get(MAIN_REWARD)
        return (float(part) if isinstance(part, Real) else self.reward_value(reward_key)) >= PASS_REWARD


@dataclass(slots=True)
class SampleGroup:
    """All samples of one prompt, drawn together."""

    index: int
    row: int
    """Row of the prompt in the dataset."""
    samples: list[Sample]
    kept: bool = True
    """False: recorded but not trained on (dropped by a filter, surplus, aborted)."""
    drop_reason: str | None = None
    """Reason why the group was dropped, such as a filter's; None if it was kept."""

    @property
    def finished(self) -> bool:
        return all(sample.finished for sample in self.samples)


@dataclass(slots=True, frozen=True)
class TurnReward:
    """Reward of one turn, in the sample that holds the turn."""

    end: int
    """Number of response tokens up to and including the last token of the turn."""
    reward: float


@dataclass(slots=True)
class TrainSample:
    """Scored sample: inputs of the loss per response token."""

    index: int
    group_index: int
    tokens: IntArray
    """[T] token ids of prompt and response."""
    prompt_length: int
    """P = T - R"""
    loss_mask: MaskArray
    """[R] 1 on tokens to train on."""
    reward: float
    """Scalar reward that the estimator uses, after --reward-key and post-processing."""
    engine_logprobs: FloatArray
    """[R] log-probabilities of the engine that sampled the tokens; zeros for data without an engine (SFT)."""
    versions: IntArray
    """[R] policy version that sampled each token."""
    mask_sum: float
    """Denominator of this sample's mean: mask sum of the whole response, shared by samples split from one response."""
    status: SampleStatus = SampleStatus.COMPLETED
    old_logprobs: FloatArray | None = None
    """[R] log-probabilities of the trainer before the first optimizer step of the rollout; None if the loss does not need them."""
    ref_logprobs: FloatArray | None = None
    """[R] log-probabilities of the reference model; None without one."""
    teacher_logprobs: FloatArray | None = None
    """[R] log-probabilities of the teacher (--use-opd); None without one."""
    values: FloatArray | None = None
    """[R] expected return before each token, from the value model before the first optimizer step; None without one."""
    returns: FloatArray | None = None
    """[R] targets of the value model, set by `assign_advantages`; None without one."""
    routed_experts: RoutedExperts | None = None
    """[n, M, K] experts of the first n <= T - 1 tokens, which training reuses; the routers choose for later tokens, and for all if None."""
    images: tuple[PromptImage, ...] = ()
    """Images of the prompt, in the order of their tokens."""
    turn_rewards: tuple[TurnReward, ...] | None = None
    """Rewards of the turns in this sample, in order; None if the episode was rewarded as a whole."""
    advantages: FloatArray = field(default_factory=_empty_floats)
    """[R] advantages, set by `assign_advantages`."""

    @property
    def response_length(self) -> int:
        return len(self.tokens) - self.prompt_length


@dataclass(slots=True)
class TrainBatch:
    """Samples of a rollout with advantages, split into optimizer steps."""

    samples: list[TrainSample]
    steps: list[list[int]]
    """Positions in `samples` of every optimizer step; no sample moves between steps."""
    num_rollouts_per_step: list[int]
    """Divisor of the per-sample mean of every step: number of responses, however they were split into samples."""


@dataclass(slots=True)
class TokenScores:
    """Scores of one sample's response tokens in the forward pass of the step."""

    logprobs: FloatArray
    """[R] log-probabilities of the response tokens, in nats."""
    entropy: FloatArray
    """[R] in nats"""


@dataclass(slots=True)
class StepResult:
    """Result of training on one rollout."""

    metrics: dict[str, float]
    """`train/*`: means over the optimizer steps of the rollout (maxima of `*_max`), and figures of the whole rollout, such as tokens/s."""
    scores: dict[int, TokenScores]
    """Scores by position in `TrainBatch.samples`; empty on ranks other than the first."""
    num_tokens: int
    """Tokens of the forward and backward passes: all but the last of each sample, which predicts nothing."""
    rank_spans: list[list[Span]] = field(default_factory=list)
    """Intervals of each rank since the previous call of `train`; empty on ranks other than the first."""
