"""Evaluation by `--eval-function-path`: `(args, rollout_id, data_source, evaluation=True)`, plain or async."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass
from typing import Any

from fuligo.config.hooks import reraised
from fuligo.engines.generation import SamplingParams
from fuligo.errors import RolloutError
from fuligo.quantities import count
from fuligo.rollout.custom_generate import default_generate
from fuligo.rollout.custom_rollout import call, completed_group
from fuligo.rollout.custom_source import NO_ROW
from fuligo.rollout.evaluate import EvalSet, Evaluation, eval_metrics
from fuligo.rollout.protocol import GenerateFn, is_group_list
from fuligo.rollout.source import new_group
from fuligo.types import Sample


class EvalData:
    """`data_source` of an evaluation function: fresh samples of the evaluation data."""

    def __init__(self, sets: Sequence[EvalSet]) -> None:
        self._sets = {eval_set.name: eval_set for eval_set in sets}

    @property
    def names(self) -> list[str]:
        return list(self._sets)

    def get_samples(self, name: str) -> list[list[Sample]]:
        """Return a group of pending samples for each prompt of a dataset."""
        eval_set = self._sets[name]
        return [new_group(deepcopy(prompt), i, eval_set.num_samples).samples for i, prompt in enumerate(eval_set.prompts)]


@dataclass(eq=False)
class CustomEvaluator:
    """Evaluator that calls the user's function, which returns finished samples with rewards by dataset. Implements `Evaluates`."""

    hook: Callable[..., Any]
    args: Any
    sets: Sequence[EvalSet]
    generate: GenerateFn
    params: SamplingParams
    _: KW_ONLY
    policy_version: Callable[[], int]
    reward_key: str | None
    """Key of dict rewards to report for datasets that the function adds to `sets`; None if rewards are numbers."""
    vocab_size: int | None
    """Number of token ids that the model has; None: ids are not checked."""

    async def evaluate(self, rollout_id: int) -> Evaluation:
        """Call the function and compute the metrics of its samples. Raises RolloutError if it raised or its samples are unusable."""
        text = f"--eval-function-path: the function raised after {count(rollout_id, 'rollout')}:"
        with reraised(text, self.hook), default_generate(self.generate, self.params):
            result = await call(self.hook, self.args, rollout_id, EvalData(self.sets), evaluation=True)
        evaluation, version = Evaluation({}, {}), self.policy_version()
        own_keys = {eval_set.name: eval_set.reward_key for eval_set in self.sets}
        fits = isinstance(result, dict) and result and all(isinstance(name, str) and "/" not in name for name in result)
        if not fits or not is_group_list(list(result.values())):
            raise RolloutError(
                "--eval-function-path must return a dict from dataset names (without '/') to non-empty lists of Sample; "
                f"it returned {result!r:.200}"
            )
        for name, samples in result.items():
            reward_key = own_keys.get(name, self.reward_key)
            members: dict[int, list[Sample]] = {}
            for sample in samples:
                members.setdefault(sample.group_index, []).append(sample)
            groups = [
                completed_group(group, version, dict.fromkeys(members, NO_ROW), self.vocab_size, reward_key) for group in members.values()
            ]
            evaluation.groups[name] = groups
            evaluation.reward_keys[name] = reward_key
            evaluation.metrics |= eval_metrics(name, max(map(len, members.values())), reward_key, groups)
        return evaluation

    async def close(self) -> None:
        """Do nothing: the function judges its samples itself."""
