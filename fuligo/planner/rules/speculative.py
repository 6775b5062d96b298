"""Speculative decoding in engines.

Source: SGLang 0.5.15.post1, `arg_groups/speculative_hook.py`, `ServerArgs.check_server_args`.
"""

from collections.abc import Iterator

from fuligo.config.findings import Change, Severity
from fuligo.config.topology import DRAFTS_OF_MODEL, EngineGroupSpec
from fuligo.planner.rules.rule import Fix, Violation, rule
from fuligo.planner.rules.servers import group_rule, option, placed, running, set_argument, set_each, shown, where
from fuligo.planner.subject import Subject

ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH", "FROZEN_KV_MTP")
_TREE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
_WITHOUT_DP_ATTENTION = ("STANDALONE", "NGRAM", "DFLASH")


def _algorithm(spec: EngineGroupSpec) -> str | None:
    given = spec.arguments.get("speculative_algorithm")
    return None if given is None else given.upper()


def _tree_of(spec: EngineGroupSpec) -> dict[str, int | None]:
    return {name: spec.arguments.get(name) for name in _TREE}


def _without(subject: Subject, spec: EngineGroupSpec) -> Fix:
    """Return the fix that disables speculative decoding."""
    given = [name for name in spec.arguments if name.startswith("speculative_")]
    return tuple(set_argument(subject, spec, name, None) for name in given)


@group_rule("PLAN-SPEC-ALGORITHM", "--sglang-speculative-algorithm", groups=running)
def algorithm_is_known(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """SGLang supports a fixed list of speculative algorithms."""
    name = _algorithm(spec)
    if name is not None and name not in ALGORITHMS:
        text = f"{placed(spec, 'speculative_algorithm')} is not one of {', '.join(ALGORITHMS)}"
        yield Violation(text, set_each(subject, spec, "speculative_algorithm", "EAGLE"))


@rule("PLAN-SPEC-NO-EFFECT", "--sglang-speculative-algorithm")
def something_is_drafted(subject: Subject) -> Iterator[Violation]:
    """Settings of speculative decoding have no effect without an algorithm."""
    groups = running(subject)
    given = [name for name in subject.config.sglang if name.startswith("speculative_")]
    if groups and given and all(_algorithm(spec) is None for spec in groups):
        options = tuple(option(name) for name in given)
        have = "has" if len(options) == 1 else "have"
        yield Violation(
            f"{' and '.join(options)} {have} no effect without --sglang-speculative-algorithm",
            ((Change(("sglang", "speculative_algorithm"), "EAGLE"),), tuple(Change(("sglang", name), None) for name in given)),
            flags=options,
        )


@group_rule("PLAN-SPEC-TREE", *(option(name) for name in _TREE), groups=running)
def tree_is_complete(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """Steps, branches and draft tokens describe one tree, so set all three or none."""
    tree = _tree_of(spec)
    missing = [name for name, value in tree.items() if value is None]
    if _algorithm(spec) not in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE") or not missing or len(missing) == len(_TREE):
        return
    steps = tree["speculative_num_steps"] or max(1, (tree["speculative_num_draft_tokens"] or 4) - 1)
    whole = {"speculative_num_steps": steps, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": steps + 1}
    yield Violation(
        f"{' '.join(shown(spec, name) for name in _TREE if name not in missing)}{where(spec)} without "
        f"{' and '.join(option(name) for name in missing)}: SGLang needs all three or none",
        (
            tuple(set_argument(subject, spec, name, whole[name]) for name in missing),
            tuple(set_argument(subject, spec, name, None) for name in _TREE if name not in missing),
        ),
    )


@group_rule("PLAN-SPEC-DRAFT-TOKENS", *(option(name) for name in _TREE), severity=Severity.WARNING, groups=running)
def chain_has_a_token_more_than_steps(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """With one branch (topk 1) the number of draft tokens is steps + 1; SGLang silently corrects other values."""
    steps, branches, tokens = _tree_of(spec).values()
    if _algorithm(spec) is None or None in (steps, branches, tokens) or branches != 1 or tokens == (steps or 0) + 1:
        return
    yield Violation(
        f"{placed(spec, 'speculative_num_draft_tokens')}: with {shown(spec, 'speculative_eagle_topk')} SGLang uses "
        f"{shown(spec, 'speculative_num_steps')} + 1 = {(steps or 0) + 1}",
        set_each(subject, spec, "speculative_num_draft_tokens", (steps or 0) + 1),
    )


@group_rule("PLAN-SPEC-TREE-SIZE", *(option(name) for name in _TREE), groups=running)
def tree_has_so_many_tokens(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """The tokens to verify come from the tree, which has topk + (steps - 1) topk^2 nodes besides its root."""
    steps, branches, tokens = _tree_of(spec).values()
    if _algorithm(spec) is None or steps is None or branches is None or tokens is None or branches == 1:
        return
    nodes = branches + (steps - 1) * branches**2 + 1
    if tokens > nodes:
        yield Violation(
            f"{placed(spec, 'speculative_num_draft_tokens')} exceeds the {nodes} nodes of a tree with "
            f"{shown(spec, 'speculative_num_steps')} and {shown(spec, 'speculative_eagle_topk')}",
            set_each(subject, spec, "speculative_num_draft_tokens", nodes),
        )


@group_rule("PLAN-SPEC-NO-DRAFT", "--sglang-speculative-algorithm", "--sglang-speculative-draft-model-path")
def there_is_a_draft(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """Except with NGRAM, drafts come from the checkpoint's own MTP layer or from a draft model."""
    name = _algorithm(spec)
    if name in (None, "NGRAM") or spec.arguments.get("speculative_draft_model_path") is not None:
        return
    own = name in DRAFTS_OF_MODEL and subject.engine_config_json is not None
    if (own and not subject.rollout_architecture.mtp_layers) or name in ("EAGLE3", "STANDALONE", "DFLASH"):
        reason = "the checkpoint has no MTP layer" if own else "it needs a draft model"
        text = f"{placed(spec, 'speculative_algorithm')} without --sglang-speculative-draft-model-path: {reason}"
        yield Violation(text, (_without(subject, spec),), "use a draft model")


@group_rule("PLAN-SPEC-PP", "--sglang-speculative-algorithm", "--sglang-pp-size", groups=running)
def drafts_need_one_stage(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """SGLang supports speculative decoding in a single pipeline stage only."""
    if _algorithm(spec) is not None and spec.pp_size > 1:
        text = f"{placed(spec, 'speculative_algorithm')} cannot be combined with {shown(spec, 'pp_size')}"
        yield Violation(text, ((set_argument(subject, spec, "pp_size", None),), _without(subject, spec)))


@group_rule("PLAN-SPEC-DP-ATTENTION", "--sglang-speculative-algorithm", "--sglang-enable-dp-attention", groups=running)
def algorithm_knows_replicas(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """Some speculative algorithms do not support DP attention."""
    name = _algorithm(spec)
    if name in _WITHOUT_DP_ATTENTION and spec.dp_size > 1:
        text = f"{placed(spec, 'speculative_algorithm')} cannot be combined with --sglang-enable-dp-attention"
        yield Violation(text, (_without(subject, spec),))
