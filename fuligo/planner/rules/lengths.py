"""Lengths and numbers of samples: limits of the model, the engines' context, the trainer's micro-batches and dynamic sampling.

Source: SGLang 0.5.15.post1, `configs/model_config.py` (context length).
"""

from collections.abc import Iterator

from fuligo.config import Config
from fuligo.config.findings import Severity
from fuligo.config.flag import option_name
from fuligo.config.rules.rule import set_flag
from fuligo.config.topology import EngineGroupSpec
from fuligo.errors import ConfigError
from fuligo.planner.layout import make_layout
from fuligo.planner.lengths import longest_prompt, longest_sample
from fuligo.planner.memory.bars import trainer_bars
from fuligo.planner.rules.parallel import dense_sizes_divide
from fuligo.planner.rules.rule import Violation, rule
from fuligo.planner.rules.servers import group_rule, placed, serving_policy, set_each
from fuligo.planner.sampled_groups import LIKELY, has_filter, sampled_groups
from fuligo.planner.subject import Subject
from fuligo.quantities import amount

_DOUBLINGS = range(1, 8)
"""Exponents of the powers of two by which the number of waves is multiplied to find one that is enough."""
_LONGER_ALLOWED = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"


@group_rule("PLAN-CONTEXT-LENGTH", "--sglang-context-length")
def context_is_the_models(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """The engines' context cannot exceed the model's `max_position_embeddings`."""
    most = subject.rollout_architecture.max_position_embeddings
    if subject.config.cluster.env.get(_LONGER_ALLOWED, "0").lower() in ("1", "true"):
        return
    if (spec.arguments.get("context_length") or 0) > most:
        text = f"{placed(spec, 'context_length')} is more than the model's {most} positions"
        yield Violation(text, set_each(subject, spec, "context_length", most, None), f"or allow it with {_LONGER_ALLOWED}=1 in --env")


@rule("PLAN-RESPONSE-CONTEXT", "--rollout-max-response-len", "--eval-max-response-len", "--rollout-max-context-len")
def samples_fit_the_context(subject: Subject) -> Iterator[Violation]:
    """A prompt with its longest response must fit the engines' context; engines reject longer requests."""
    config = subject.config
    if not config.needs_engine:
        return
    model = subject.rollout_architecture.max_position_embeddings
    contexts = [spec.arguments.get("context_length") or model for spec in serving_policy(subject)] or [model]
    context, source = min(contexts), "--sglang-context-length" if min(contexts) < model else "the model's max_position_embeddings"
    bounded = config.rollout.rollout_max_context_len
    if bounded is not None and bounded > context:
        text = f"--rollout-max-context-len {bounded} is more than the {context} tokens of the engines' context ({source})"
        yield Violation(text, ((set_flag("rollout_max_context_len", context),),), flags=("--rollout-max-context-len",))
        return
    lengths = {} if config.is_sft else {"rollout_max_response_len": config.rollout.rollout_max_response_len}
    if config.has_eval and config.eval.eval_max_response_len is not None:
        lengths["eval_max_response_len"] = config.eval.eval_max_response_len
    prompt = config.data.rollout_max_prompt_len or 1
    for name, length in lengths.items():
        if prompt + length > context and (name == "eval_max_response_len" or bounded is None):
            option = option_name(name)
            known = config.data.rollout_max_prompt_len
            with_prompt = f" and --rollout-max-prompt-len {known}" if known else " and a prompt"
            room = context - (known or min(longest_prompt(config), context // 2))
            text = f"{option} {length}{with_prompt} do not fit into the {context} tokens of the engines' context ({source})"
            yield Violation(text, ((set_flag(name, room),),) if room > 0 else (), "shorten prompts or responses", flags=(option,))


@rule("PLAN-MAX-TOKENS", "--max-tokens-per-gpu", "--rollout-max-response-len", severity=Severity.WARNING)
def micro_batches_hold_the_longest_sample(subject: Subject) -> Iterator[Violation]:
    """Samples are never truncated: one that exceeds the micro-batch limit becomes a separate micro-batch and needs more memory."""
    config, tokens = subject.config, subject.config.train.max_tokens_per_gpu
    unknown = config.is_sft and config.max_sample_tokens is None  # the lengths of conversations are known from the file only
    if not config.train.use_dynamic_batch_size or tokens is None or unknown:
        return
    cp = config.parallel.context_parallel_size if subject.is_megatron else 1
    longest = longest_sample(config)
    if longest <= tokens * cp:
        return
    times = f" x --context-parallel-size {cp} = {tokens * cp}" if cp > 1 else ""
    yield Violation(
        f"--max-tokens-per-gpu {tokens}{times} is smaller than the longest sample ({longest} tokens: {_of_what(config)}); such "
        f"a sample becomes a separate micro-batch{_activations(subject)}",
        ((set_flag("max_tokens_per_gpu", -(-longest // cp)),),),
        "plan for that memory, raise --context-parallel-size, or shorten responses",
    )


def _of_what(config: Config) -> str:
    if config.is_sft:
        return "--rollout-max-prompt-len for the whole conversation"
    if config.max_sample_tokens is not None:
        return "--rollout-max-context-len, or the longest prompt and response"
    return f"--rollout-max-response-len {config.rollout.rollout_max_response_len} and a prompt of {longest_prompt(config)}"


def _activations(subject: Subject) -> str:
    """Return ` with 12 GiB of activations per GPU`; an empty string if the sizes allow no layout."""
    if subject.is_megatron and not dense_sizes_divide(subject.config):
        return ""
    try:
        bars = trainer_bars(subject, make_layout(subject))
    except ConfigError:
        return ""
    of_trainer = [item.num_bytes for bar in bars for item in bar.items if item.name == "activations"]
    return f" with {amount(max(of_trainer))} of activations per GPU" if of_trainer else ""


@rule("PLAN-SAMPLING-WAVES", "--max-sampling-waves", "--dynamic-sampling-filter-path", severity=Severity.WARNING)
def waves_fill_a_rollout(subject: Subject) -> Iterator[Violation]:
    """A rollout that is not full after the last wave ends the run."""
    config = subject.config
    if not config.needs_engine or config.is_sft or not has_filter(config):
        return
    unfilled = sampled_groups(subject).unfilled
    if unfilled < LIKELY:
        return
    waves = config.rollout.max_sampling_waves
    yield Violation(
        f"--max-sampling-waves {waves}: a rollout ends the run with probability {unfilled:.0%}, because fewer than --rollout-batch-size "
        f"{config.rollout.rollout_batch_size} groups pass the filter, if it keeps {100 * subject.assumed.kept_share:.3g}% of them "
        "(fuligo plan --kept-share)",
        tuple((set_flag("max_sampling_waves", waves << doubling),) for doubling in _DOUBLINGS),
        "or start more prompts per wave (--over-sampling-batch-size)",
        flags=("--max-sampling-waves",),
    )
