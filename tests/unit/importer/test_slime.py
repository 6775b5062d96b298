"""slime's command lines in fuligo's words."""

import pytest

from fuligo.importer.calls import Training
from fuligo.importer.slime import translate, without_megatron

COMPLETE = "--actor-num-gpus-per-node 8 --n-samples-per-prompt 8 --lr-decay-style constant --use-dynamic-batch-size --rm-type math"
QUIET = "--rollout-max-response-len 4096 --attention-dropout 0.0 --hidden-dropout 0.0"


def translated(arguments: str, *, is_async: bool = False) -> tuple[str, list[str]]:
    """Return the further arguments and the notes of a command line that relies on no default."""
    line, notes = translate(Training((*COMPLETE.split(), *QUIET.split(), *arguments.split()), is_async))
    text = " ".join(line)
    assert text.startswith(f"{COMPLETE} {QUIET}")
    return text.removeprefix(f"{COMPLETE} {QUIET}").strip(), notes


def test_a_complete_command_line_is_unchanged():
    arguments = "--rollout-batch-size 32 --rollout-stop-token-ids 1 2 --apply-chat-template-kwargs={} --rotary-base 1 --rotary-base 2"
    assert translated(arguments) == (arguments, [])


@pytest.mark.parametrize(
    ("arguments", "expected", "note"),
    [
        ("--use-wandb --wandb-key secret", "--use-wandb", "set WANDB_API_KEY"),
        ("--wandb-key", "", "set WANDB_API_KEY"),
        (
            "--wandb-team t --record-memory-history --tb-project-name p --get-mismatch-metrics",
            "",
            "--wandb-team t is left out: set WANDB_ENTITY",
        ),
        ("--make-vocab-size-divisible-by 64 --no-position-embedding", "", "--make-vocab-size-divisible-by 64 is left out: fuligo pads"),
        ("--no-check-for-nan-in-loss-and-grad --bf16 --enable-experimental", "--bf16", "fuligo always ends a run whose loss is not finite"),
        ("--model-name qwen3_moe", "", "--model-name qwen3_moe is left out: fuligo reads the model type from config.json"),
        ("--sglang-server-concurrency=64 --rollout-batch-size 32", "--rollout-batch-size 32 --rollout-concurrency 64", "per engine"),
        (
            "--sglang-server-concurrency 64 --colocate --rollout-num-gpus-per-engine 2 --rollout-batch-size 128",
            "--colocate --rollout-num-gpus-per-engine 2 --rollout-batch-size 128 --rollout-concurrency 256",
            "for all engines",
        ),
        ("--sglang-server-concurrency 1024 --rollout-batch-size 16", "--rollout-batch-size 16", "a rollout has at most 128 requests"),
        ("--rollout-num-gpus 16 --rollout-batch-size 128", "--rollout-num-gpus 16 --rollout-batch-size 128", ""),
        ("--rollout-function-path slime.rollout.sglang_rollout.generate_rollout", "", ""),
        (
            "--rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss --debug-train-only"
            " --disable-compute-advantages-and-returns --loss-mask-type qwen3",
            "--loss-type sft_loss",
            "--debug-train-only is left out",
        ),
        (
            "--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async",
            "--async-mode full",
            "limit the policy lag with --max-staleness",
        ),
        (
            "--use-opd --custom-rm-path slime.rollout.on_policy_distillation.reward_func --rm-url http://h:13141/generate"
            " --custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards",
            "--use-opd --opd-teacher-url http://h:13141",
            "--opd-teacher-url",
        ),
        (
            "--lr-warmup-fraction 0.1 --num-rollout 100 --rollout-batch-size 32 --global-batch-size 128",
            "--num-rollout 100 --rollout-batch-size 32 --global-batch-size 128 --lr-warmup-iters 20",
            "--lr-warmup-iters 20 of 200 steps",
        ),
        ("--lr-warmup-fraction 0.1 --num-epoch 3", "--num-epoch 3", "set --lr-warmup-iters to 0.1"),
        ("--eval-function-path slime.rollout.x.y", "--eval-function-path slime.rollout.x.y", "port it to fuligo's hook"),
        (
            "--dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
            "--dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
            "",
        ),
    ],
)
def test_translation(arguments: str, expected: str, note: str):
    line, notes = translated(arguments)
    assert line == expected
    assert any(note in text for text in notes) if note else notes == []
    assert "secret" not in str(notes)


def test_train_async_runs_one_step_ahead():
    assert translated("", is_async=True)[0] == "--async-mode one-step"
    assert translated("--rollout-function-path fully_async_rollout.generate_rollout_fully_async", is_async=True)[0] == "--async-mode full"


def test_defaults_that_differ_are_filled_in_and_named():
    line, notes = translate(Training(("--lr", "1e-6")))
    assert " ".join(line) == (
        "--lr 1e-6 --actor-num-gpus-per-node 8 --n-samples-per-prompt 1 --lr-decay-style linear --micro-batch-size 1"
        " --metadata-key metadata"
    )
    assert len([note for note in notes if "is filled in" in note]) == 5
    assert any("--rollout-max-response-len" in note for note in notes)
    assert any("fuligo trains without dropout" in note for note in notes)


def test_a_column_of_metadata_is_read_where_the_reward_needs_it():
    assert translate(Training(("--rm-type", "ifbench")))[0][-2:] == ("--metadata-key", "metadata")
    assert "--metadata-key" not in translate(Training(("--rm-type", "math")))[0]


def test_responses_get_slimes_limit_the_context():
    line, _ = translate(Training(("--rollout-max-context-len", "16384")))
    assert line[line.index("--rollout-max-response-len") + 1] == "16384"
    given = ("--rollout-max-context-len", "16384", "--rollout-max-response-len", "8")
    assert translate(Training(given))[0].count("--rollout-max-response-len") == 1
    assert "--rollout-max-response-len" not in translate(Training(("--lr", "1")))[0]


def test_columns_that_slime_reads_where_rows_have_them_are_named():
    def named(*arguments: str) -> list[str]:
        return [note.split()[0] for note in translate(Training(arguments))[1] if "where rows have it" in note]

    assert named("--apply-chat-template", "--rm-type", "math") == ["--tool-key"]
    assert named("--custom-rm-path", "my.reward") == ["--metadata-key"]
    assert named("--custom-rm-path", "my.reward", "--metadata-key", "extra", "--tool-key", "t", "--apply-chat-template") == []
    assert named("--rm-type", "math") == []


@pytest.mark.parametrize(
    ("path", "kept"), [("/root/Megatron-LM/", None), ("/root/Megatron-LM:/code", "/code"), ("/code::/opt/megatron", "/code")]
)
def test_megatron_is_left_out_of_the_python_path(path: str, kept: str | None) -> None:
    environment, (note,) = without_megatron({"A": "1", "PYTHONPATH": path})
    assert environment == {"A": "1"} | ({} if kept is None else {"PYTHONPATH": kept})
    assert "is left out of PYTHONPATH: fuligo uses the installed Megatron-Core" in note


@pytest.mark.parametrize("environment", [{}, {"PYTHONPATH": "/code:/root/slime"}])
def test_other_directories_stay_in_the_python_path(environment: dict[str, str]) -> None:
    assert without_megatron(environment) == (environment, [])
