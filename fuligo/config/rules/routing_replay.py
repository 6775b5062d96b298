"""What goes together with routing replay."""

from __future__ import annotations

from collections.abc import Iterator

from fuligo.config import Config
from fuligo.config.findings import Change, Severity
from fuligo.config.rules.rule import Violation, rule, set_flag, unset_flag
from fuligo.config.topology import EngineGroupSpec, engine_groups, policy_model


def _records(config: Config) -> bool:
    """The trainer's own choice is what is replayed."""
    return config.replays_routing and not config.replays_engine_routing


@rule("CFG-REPLAY-OLD-POLICY", "--use-routing-replay", "--use-rollout-logprobs")
def engines_do_not_score_with_the_trainers_routing(config: Config) -> Violation | None:
    """Where the old log-probabilities are the engine's, so is the routing that gave them."""
    if not (_records(config) and config.algorithm.use_rollout_logprobs):
        return None
    return Violation(
        "--use-routing-replay keeps to the experts of the pass that gave the old log-probabilities, and with --use-rollout-logprobs that "
        "was the engine's",
        (set_flag("use_rollout_routing_replay", True), unset_flag("use_routing_replay")),
    )


@rule("CFG-REPLAY-ONE-STEP", "--use-routing-replay", severity=Severity.WARNING)
def one_step_replays_itself(config: Config) -> Violation | None:
    """With one optimizer step a rollout the step's own pass gives the old log-probabilities."""
    if not _records(config) or config.needs_old_logprobs or config.algorithm.use_rollout_logprobs:
        return None
    return Violation(
        "--use-routing-replay with one optimizer step a rollout changes nothing: the step's own pass gives the old log-probabilities",
        (unset_flag("use_routing_replay"),),
        "or take several steps (--num-steps-per-rollout)",
    )


@rule("CFG-REPLAY-FUSED", "--use-routing-replay", "--use-rollout-routing-replay", "--moe-router-fusion")
def a_fused_choice_cannot_be_replayed(config: Config) -> Violation | None:
    """TransformerEngine's fused kernel chooses and weighs the experts in one go."""
    if not config.replays_routing or not config.megatron.get("moe_router_fusion"):
        return None
    text = "--moe-router-fusion chooses and weighs experts in one kernel, which cannot be told the choice for routing replay"
    return Violation(text, (Change(("megatron", "moe_router_fusion"), None),), flags=("--moe-router-fusion",))


@rule("CFG-REPLAY-ENGINE", "--use-rollout-routing-replay", "--rollout-backend")
def the_engine_says_where_tokens_went(config: Config) -> Violation | None:
    """SGLang records the experts of every token, the embedded engine does not."""
    served_elsewhere = bool(config.engine.rollout_external_engine_addrs)
    if not config.replays_engine_routing or not config.needs_engine or served_elsewhere or config.resolved_rollout_backend == "sglang":
        return None
    return Violation(
        "--use-rollout-routing-replay needs SGLang engines, which record the experts of every token; --rollout-backend is embedded",
        advice="give --rollout-backend sglang, or --use-routing-replay for the trainer's own choice",
    )


@rule("CFG-REPLAY-RECORD", "--use-rollout-routing-replay")
def the_record_of_engines_is_whole(config: Config) -> Violation | None:
    """SGLang 0.5.15 keeps the record beside the KV cache, in the process that computes a token, and does not move it with the cache."""
    if not config.replays_engine_routing or not config.needs_engine:
        return None
    groups = engine_groups(config)
    holes = dict.fromkeys(hole for group in groups if group.model == policy_model(config) for hole in _holes(group))
    if not holes:
        return None
    return Violation(
        f"--use-rollout-routing-replay with {' and '.join(holes)}: SGLang's record of experts would not be whole",
        advice="leave that out, or use --use-routing-replay",
    )


def _holes(group: EngineGroupSpec) -> Iterator[str]:
    arguments = group.arguments
    if group.worker_type in ("prefill", "decode"):
        yield "prefill and decode engines"
    if group.pp_size > 1:
        yield f"--sglang-pp-size {group.pp_size}"
    for name in ("enable_hierarchical_cache", "enable_lmcache", "enable_two_batch_overlap"):
        if arguments.value(name):
            yield f"--sglang-{name.replace('_', '-')}"
    if arguments.value("speculative_algorithm") is not None and (arguments.value("speculative_eagle_topk") or 1) > 1:
        yield f"--sglang-speculative-eagle-topk {arguments.value('speculative_eagle_topk')}"


RULES = (
    engines_do_not_score_with_the_trainers_routing,
    one_step_replays_itself,
    a_fused_choice_cannot_be_replayed,
    the_engine_says_where_tokens_went,
    the_record_of_engines_is_whole,
)
