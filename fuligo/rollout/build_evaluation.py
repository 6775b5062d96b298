"""Construction of a run's evaluator from its configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from fuligo.config import Config
from fuligo.config.args_view import ArgsView
from fuligo.config.hooks import hook_of, load_hook
from fuligo.data.dataset import PromptDataset, PromptTooLongError
from fuligo.engines.group import EngineGroup
from fuligo.errors import DataError
from fuligo.models.vision.placing import prompt_images
from fuligo.rollout.build import reproducible, vocab_size
from fuligo.rollout.custom_eval import CustomEvaluator
from fuligo.rollout.eval_sets import EvalSetSpec, eval_set_specs
from fuligo.rollout.evaluate import EvalSet, Evaluates, Evaluator
from fuligo.rollout.protocol import GenerateFn, RewardFn
from fuligo.rollout.rewards import CustomReward, RewardRunner
from fuligo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def build_evaluator(
    config: Config,
    *,
    engines: EngineGroup,
    tokenizer: PreTrainedTokenizerBase,
    generate: GenerateFn,
    reward: RewardFn,
    policy_version: Callable[[], int],
) -> Evaluates | None:
    """Build the evaluator; return None if there are neither evaluation datasets nor an --eval-function-path.

    `reward`, that of training, judges datasets that set none. Raises ConfigError, DataError or HookError if a dataset or hook is invalid.
    """
    specs = eval_set_specs(config)
    hook = hook_of(config, "eval_function_path")
    if not specs and hook is None:
        return None
    sets = [
        EvalSet(
            name=spec.name,
            prompts=_prompts(config, spec, tokenizer),
            num_samples=spec.n_samples_per_eval_prompt or config.eval.n_samples_per_eval_prompt,
            params=spec.sampling_params(config),
            reward=_reward(config, spec) if spec.has_own_reward(config) else reward,
            reward_key=spec.reward_key or config.resolved_eval_reward_key,
        )
        for spec in specs
    ]
    if hook is not None:
        return CustomEvaluator(
            hook,
            ArgsView(config),
            sets,
            generate,
            EvalSetSpec(name="default", path=["none"]).sampling_params(config),
            policy_version=policy_version,
            reward_key=config.resolved_eval_reward_key,
            vocab_size=vocab_size(config),
        )
    own_rewards = [eval_set.reward for eval_set in sets if isinstance(eval_set.reward, RewardRunner) and eval_set.reward is not reward]
    return Evaluator(
        sets,
        generate,
        engines,
        seed=config.data.rollout_seed,
        concurrency=config.resolved_rollout_concurrency,
        timeout_s=config.sample_timeout_s,
        aligned=reproducible(config),
        on_close=[own.close for own in own_rewards],
    )


def _prompts(config: Config, spec: EvalSetSpec, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    dataset = PromptDataset.open(spec.path, spec.data_flags(config), tokenizer, prompt_images(config))
    prompts: list[Prompt] = []
    num_skipped = 0
    for row in range(len(dataset)):
        try:
            prompts.append(dataset[row])
        except DataError as error:
            if not isinstance(error, PromptTooLongError) and not config.data.skip_bad_rows:
                raise
            num_skipped += 1
    if num_skipped:
        logger.warning("evaluation %s: skipped %d of %d rows, which are too long or malformed", spec.name, num_skipped, len(dataset))
    return prompts


def _reward(config: Config, spec: EvalSetSpec) -> RewardRunner:
    flags = spec.reward_flags(config)
    path = flags.custom_rm_path
    custom = None if path is None else CustomReward(load_hook("custom_rm_path", path), ArgsView(config), flags.rm_timeout_s)
    return RewardRunner(flags, custom)
