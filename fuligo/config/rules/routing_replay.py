"""Rules on routing replay."""

from collections.abc import Iterator

from fuligo.config import Config
from fuligo.config.findings import Change, Rule, Severity, simple_rule
from fuligo.config.flag import option_name
from fuligo.config.rules.rule import Violation, rule, set_flag, unset_flag
from fuligo.config.topology import EngineGroupSpec, engine_groups, policy_model


def _records(config: Config) -> bool:
    """Return True if the trainer replays its own routing."""
    return config.replays_routing and not config.replays_engine_routing


@rule("CFG-REPLAY-FUSED", "--use-routing-replay", "--use-rollout-routing-replay", "--moe-router-fusion")
def fused_router(config: Config) -> Iterator[Violation]:
    """Reject TransformerEngine's fused router, which cannot take given choices."""
    if config.replays_routing and config.megatron.get("moe_router_fusion"):
        text = "--moe-router-fusion chooses and weighs experts in one kernel, which cannot replay a given choice"
        yield Violation(text, (Change(("megatron", "moe_router_fusion"), None),), flags=("--moe-router-fusion",))


@rule("CFG-REPLAY-RECORD", "--use-rollout-routing-replay")
def complete_routing_record(config: Config) -> Iterator[Violation]:
    """Reject engine settings that lose routing records: SGLang 0.5.15 keeps them in the process that computes a token."""
    if config.replays_engine_routing and config.needs_engine:
        groups = engine_groups(config)
        holes = dict.fromkeys(hole for group in groups if group.model == policy_model(config) for hole in _holes(group))
        if holes:
            text = f"--use-rollout-routing-replay with {' and '.join(holes)}: SGLang's record of experts would be incomplete"
            yield Violation(text, advice="remove these settings, or use --use-routing-replay")


def _holes(group: EngineGroupSpec) -> Iterator[str]:
    arguments = group.arguments
    if group.worker_type in ("prefill", "decode"):
        yield "prefill and decode engines"
    if group.pp_size > 1:
        yield f"--sglang-pp-size {group.pp_size}"
    for name in ("enable_hierarchical_cache", "enable_lmcache", "enable_two_batch_overlap"):
        if arguments.value(name):
            yield option_name(f"sglang_{name}")
    if arguments.value("speculative_algorithm") is not None and (arguments.value("speculative_eagle_topk") or 1) > 1:
        yield f"--sglang-speculative-eagle-topk {arguments.value('speculative_eagle_topk')}"


# fmt: off
TABLE: tuple[Rule[Config, Change], ...] = (
    simple_rule("CFG-REPLAY-OLD-POLICY", "--use-routing-replay --use-rollout-logprobs",
        "Reject replay of the trainer's routing with the engine's log-probabilities, which were computed with the engine's routing.",
        lambda config: _records(config) and config.algorithm.use_rollout_logprobs,
        "--use-routing-replay repeats the routing of the pass that computed the old log-probabilities, but with --use-rollout-logprobs "
        "they come from the engine",
        set_flag("use_rollout_routing_replay", True), unset_flag("use_routing_replay")),
    simple_rule("CFG-REPLAY-ONE-STEP", "--use-routing-replay",
        "Warn about replay with one optimizer step per rollout: the step itself computes the old log-probabilities.",
        lambda config: _records(config) and not (config.needs_old_logprobs or config.algorithm.use_rollout_logprobs),
        "--use-routing-replay with one optimizer step per rollout has no effect: the step itself computes the old log-probabilities",
        unset_flag("use_routing_replay"), advice="or take several steps (--num-steps-per-rollout)", severity=Severity.WARNING),
    simple_rule("CFG-REPLAY-ENGINE", "--use-rollout-routing-replay --rollout-backend",
        "Require SGLang engines for engine routing: the embedded engine does not record experts.",
        lambda config: config.replays_engine_routing and config.needs_engine
        and not (config.engine.rollout_external_engine_addrs or config.engine_capabilities.records_routing),
        "--use-rollout-routing-replay needs SGLang engines, which record the experts of every token, but --rollout-backend is embedded",
        advice="use --rollout-backend sglang, or --use-routing-replay for the trainer's own routing"),
)
# fmt: on
