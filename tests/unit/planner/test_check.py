"""Check of all rules: order, repeats, tested fixes, mistakes in published recipes, several mistakes at once."""

import random
import re
from collections import Counter
from dataclasses import replace

import pytest

from fuligo.config.changes import apply_changes, change_text
from fuligo.config.command_line import parse
from fuligo.config.findings import Change, Finding, Severity
from fuligo.planner.check import check, violations
from fuligo.planner.layout import stages
from fuligo.planner.subject import Subject, read_subject
from tests.unit.planner.rules.recipe_runs import DENSE, DRAFTS, EXAMPLES, FP8, LARGE, MIXTURE, REDUNDANT, SEPARATE, SPARSE, Run


def _fixes(findings: tuple[Finding, ...]) -> dict[str, list[str]]:
    return {finding.id: [change_text(change) for change in finding.fix] for finding in findings}


def test_redundant_experts_and_replicas_of_24_gpus_as_once_published_are_two_findings() -> None:
    run = Run(REDUNDANT, "--sglang-dp-size 3 --sglang-ep-num-redundant-experts 16")
    found = check(run.subject())
    assert _fixes(found) == {
        "PLAN-ENGINE-HEADS": ["--sglang-dp-size 6"],
        "PLAN-ENGINE-EXPERTS": ["--sglang-ep-num-redundant-experts 8"],
    }
    heads, experts = (finding.text for finding in found)
    assert "8 does not divide the model's 20 attention heads" in heads
    assert "64 experts + 16 redundant (" in experts and "= 80 are not divisible by --sglang-ep-size 24" in experts


@pytest.mark.parametrize(("bound", "warned"), [("", []), ("--rollout-max-prompt-len 64", []), ("--rollout-max-prompt-len 65", ["65"])])
def test_conversations_are_as_long_as_the_bound_says(bound: str, warned: list[str]) -> None:
    """Supervised training samples nothing, so the response length does not matter."""
    model = EXAMPLES / "qwen3-4b" / "model" / "config.json"
    flags = f"--model-config-file {model} --loss-type sft_loss --prompt-data d.jsonl --num-epoch 1 --apply-chat-template {bound}"
    config = parse([*flags.split(), "--use-dynamic-batch-size", "--max-tokens-per-gpu", "64", "--train-backend", "torch"]).config
    found = [finding for finding in check(read_subject(config, "h100-80")) if finding.id == "PLAN-MAX-TOKENS"]
    assert [re.findall(r"longest sample \((\d+) tokens: --rollout-max-prompt-len", finding.text)[0] for finding in found] == warned


def test_a_step_larger_than_a_rollout_is_one_finding() -> None:
    """32 x 8 samples have no whole step of 1000."""
    run = Run(DENSE, "--global-batch-size 1000", changes=(Change(("train", "num_steps_per_rollout"), None),))
    assert _fixes(check(run.subject())) == {"CFG-GLOBAL-BATCH": ["--global-batch-size 256"]}


@pytest.mark.parametrize("replicas", [6, 12, 24])
def test_every_number_of_replicas_that_shares_20_heads_over_24_gpus_is_accepted(replicas: int) -> None:
    assert check(Run(REDUNDANT, f"--sglang-dp-size {replicas}").subject()) == ()


def test_separate_halves_of_a_node_are_reported_as_separate() -> None:
    (finding,) = check(Run(SEPARATE).subject())
    assert finding.id == "PLAN-SPLIT-GPUS" and finding.severity is Severity.WARNING
    assert "the trainer has 4 GPUs and the engines have 4 others" in finding.text and "8 in total" in finding.text
    shared = parse(["--config", str(EXAMPLES / DENSE)]).config
    fixed = apply_changes(read_subject(parse(["--config", str(EXAMPLES / SEPARATE)]).config, "h100-80").config, finding.fix)
    assert fixed.cluster == shared.cluster


def test_an_even_cut_of_78_layers_over_8_stages_is_refused_and_the_fix_is_no_slower_than_the_published_cut() -> None:
    even = (Change(("parallel", "decoder_first_pipeline_num_layers"), None), Change(("parallel", "decoder_last_pipeline_num_layers"), None))
    subject = Run(SPARSE, changes=even).subject()
    (finding,) = check(subject)
    assert finding.id == "PLAN-PP-LAYERS"
    fixed = stages(replace(subject, config=apply_changes(subject.config, finding.fix)))
    assert all(stage.first_layer in stage.index_layers for stage in fixed)
    published = stages(Run(SPARSE).subject())
    assert [stage.first_layer + 1 for stage in published] == [1, 15, 23, 31, 39, 47, 55, 63]
    assert max(stage.num_layers for stage in fixed) <= max(stage.num_layers for stage in published)


def test_one_engine_of_256_gpus_is_beyond_deepep() -> None:
    one = Run(
        SPARSE,
        "--rollout-num-gpus-per-engine 256 --sglang-dp-size 64 --sglang-deepep-mode auto",
        changes=(Change(("engine", "sglang_config"), None),),
    )
    assert "PLAN-DEEPEP-RANKS" in {finding.id for finding in check(one.subject())}


def test_errors_come_first_and_a_rule_broken_by_two_groups_is_reported_once() -> None:
    found = check(Run(SPARSE, "--sglang-kv-cache-dtype fp8_e5m2 --max-tokens-per-gpu 512 --no-allgather-cp").subject())
    assert [finding.severity for finding in found] == [Severity.ERROR, Severity.ERROR, Severity.WARNING]
    assert Counter(finding.id for finding in found) == {"PLAN-DSA-CP": 1, "PLAN-DSA-CACHE": 1, "PLAN-MAX-TOKENS": 1}


def test_rules_of_flags_are_checked_together_with_those_of_the_model() -> None:
    found = check(Run(DENSE, "--global-batch-size 100 --num-steps-per-rollout 2 --sglang-page-size 7").subject())
    assert {finding.id for finding in found} == {"CFG-STEP-SIZES", "PLAN-CHUNK-PAGES"}


def test_a_fix_that_would_break_another_rule_is_not_shown() -> None:
    # The nearest size that divides 8 GPUs is 8, which does not divide the 20 heads.
    found = check(Run(MIXTURE, "--tensor-model-parallel-size 16 --sequence-parallel").subject())
    assert _fixes(found) == {
        "PLAN-TRAINER-GPUS": ["--tensor-model-parallel-size 4"],
        "PLAN-TP-HEADS": ["--tensor-model-parallel-size 4"],
    }


def test_what_no_change_of_flags_mends_has_advice() -> None:
    subject = Run(DENSE).subject()
    (finding,) = check(replace(subject, config=apply_changes(subject.config, (Change(("model", "hf_checkpoint"), None),))))
    assert finding.id == "CFG-MODEL-MISSING" and finding.fix == () and finding.advice


def _random_run(draw: random.Random) -> Subject:
    """Draw a recipe with several sizes and switches changed at once."""
    sizes = (
        "--tensor-model-parallel-size",
        "--pipeline-model-parallel-size",
        "--context-parallel-size",
        "--expert-model-parallel-size",
        "--expert-tensor-parallel-size",
        "--virtual-pipeline-model-parallel-size",
        "--decoder-first-pipeline-num-layers",
        "--decoder-last-pipeline-num-layers",
        "--actor-num-nodes",
        "--actor-num-gpus-per-node",
        "--rollout-num-gpus-per-engine",
        "--rollout-num-gpus",
        "--max-tokens-per-gpu",
        "--sglang-dp-size",
        "--sglang-ep-size",
        "--sglang-pp-size",
        "--sglang-page-size",
        "--sglang-chunked-prefill-size",
        "--sglang-max-running-requests",
        "--sglang-moe-dense-tp-size",
        "--sglang-ep-num-redundant-experts",
        "--sglang-speculative-num-steps",
        "--sglang-cuda-graph-max-bs-decode",
        "--mtp-num-layers",
    )
    switches = ("--no-sequence-parallel", "--sglang-enable-dp-attention", "--moe-enable-deepep", "--no-colocate", "--overlap-param-gather")
    flags = [f"{name} {draw.choice([1, 2, 3, 5, 7, 8, 12, 16, 40, 64, 100])}" for name in draw.sample(sizes, draw.randint(1, 5))]
    flags += draw.sample(switches, draw.randint(0, 2))
    recipe = draw.choice([DENSE, DRAFTS, MIXTURE, REDUNDANT, LARGE, FP8, SPARSE, SEPARATE])
    return Run(recipe, " ".join(flags), gpu=draw.choice(["h100-80", "b200", "rtx-4090"])).subject()


@pytest.mark.long
def test_of_many_mistakes_each_fix_mends_its_own_and_makes_no_new_one() -> None:
    draw = random.Random(5)
    num_fixes = 0
    for _ in range(40):
        subject = _random_run(draw)
        found = check(subject)
        before = Counter(finding.id for finding in found)
        assert before == Counter(finding.id for finding in violations(subject))
        for finding in found:
            if not finding.fix:
                assert finding.advice
                continue
            num_fixes += 1
            after = Counter(left.id for left in violations(replace(subject, config=apply_changes(subject.config, finding.fix))))
            assert after[finding.id] < before[finding.id]
            assert not after - before
    assert num_fixes > 40


def test_the_fix_for_forgotten_colocate_has_all_the_flags_it_takes() -> None:
    """`--colocate` alone would cause a warning about SGLang's default memory fraction."""
    unsaid = (
        Change(("cluster", "colocate"), False),
        Change(("cluster", "rollout_num_gpus"), None),
        Change(("sglang", "mem_fraction_static"), None),
    )
    found = check(Run(DENSE, changes=unsaid).subject())
    assert _fixes(found)["CFG-ROLLOUT-GPUS"] == ["--colocate", "--sglang-mem-fraction-static 0.7"]
    given = (*unsaid[:2], Change(("sglang", "mem_fraction_static"), 0.6))
    assert _fixes(check(Run(DENSE, changes=given).subject()))["CFG-ROLLOUT-GPUS"] == ["--colocate"]


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ("", ["--moe-token-dispatcher-type alltoall"]),
        ("--moe-enable-deepep", ["--moe-token-dispatcher-type alltoall", "drop --moe-enable-deepep"]),
    ],
)
def test_a_fix_removes_only_flags_that_are_given(given: str, fix: list[str]) -> None:
    run = Run(MIXTURE, f"--expert-model-parallel-size 1 --expert-tensor-parallel-size 1 --moe-token-dispatcher-type flex {given}")
    assert _fixes(check(run.subject()))["PLAN-FLEX-SIZE"] == fix
