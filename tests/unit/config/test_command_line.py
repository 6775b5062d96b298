import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fuligo.config import Config
from fuligo.config.command_line import parse
from fuligo.config.flags import Kind, flags, passthrough_flags
from fuligo.config.other_frameworks import moved, other_settings
from fuligo.config.rules import effects
from fuligo.config.schemas import BACKENDS
from fuligo.config.validate import findings, with_places
from fuligo.errors import ConfigError

PASSED_ON = {flag.flat_name for group in BACKENDS for flag in passthrough_flags(group).values()}


def value_of(arguments: list[str], name: str) -> object:
    config = parse(arguments).config
    return getattr(getattr(config, flags()[name].group), name)


def problems_of(arguments: list[str]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse(arguments)
    return caught.value.problems


@pytest.mark.parametrize(
    ("arguments", "name", "expected"),
    [
        (["--rollout-batch-size", "64"], "rollout_batch_size", 64),
        (["--rollout-batch-size=64"], "rollout_batch_size", 64),
        (["--rollout_batch_size", "64"], "rollout_batch_size", 64),
        (["--rollout-top-k", "-1"], "rollout_top_k", -1),
        (["--entropy-coef", "-.5"], "entropy_coef", -0.5),
        (["--lr", "1e-6"], "lr", 1e-6),
        (["--lr", "3"], "lr", 3.0),
        (["--lr-decay-style", "cosine"], "lr_decay_style", "cosine"),
        (["--name", "7"], "name", "7"),
        (["--name=--odd--"], "name", "--odd--"),
        (["--name", "a=b"], "name", "a=b"),
        (["--use-tis"], "use_tis", True),
        (["--use-tis", "true"], "use_tis", True),
        (["--use-tis", "False"], "use_tis", False),
        (["--use-tis=false"], "use_tis", False),
        (["--no-save-samples"], "save_samples", False),
        (["--save-samples", "--use-tis"], "save_samples", True),
        (
            ["--eval-prompt-data", "aime", "a.jsonl", "gsm", "b.jsonl", "--lr", "1"],
            "eval_prompt_data",
            ["aime", "a.jsonl", "gsm", "b.jsonl"],
        ),
        (["--rollout-stop-token-ids", "1", "-2"], "rollout_stop_token_ids", [1, -2]),
        (["--rollout-stop=</s>"], "rollout_stop", ["</s>"]),
        (["--rollout-stop=[]"], "rollout_stop", []),
        (['--rollout-stop=["--end", "\\n"]'], "rollout_stop", ["--end", "\n"]),
        (["--apply-chat-template-kwargs", '{"enable_thinking": false}'], "apply_chat_template_kwargs", {"enable_thinking": False}),
        (["--eps-clip-c", "3", "--eps-clip-c", "none"], "eps_clip_c", None),
        (["--load", ""], "load", None),
        (["--load", "none"], "load", None),
        (["--clip-grad", "0.5", "--clip-grad", "none"], "clip_grad", 1.0),
        (["--use-tis", "--use-tis", "none"], "use_tis", False),
        (["--rollout-stop", "a", "--rollout-stop", "none"], "rollout_stop", []),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value and isinstance(value[0], str) else "",
)
def test_syntax(arguments: list[str], name: str, expected: object) -> None:
    value = value_of(arguments, name)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["--rollout-batch-size", "many"], ["--rollout-batch-size", "'many'", "an integer >= 1", "32"]),
        (["--rollout-batch-size", "0"], ["--rollout-batch-size", "'0'", "an integer >= 1"]),
        (["--rollout-batch-size", "1.5"], ["'1.5'", "an integer"]),
        (["--rollout-top-p", "1.5"], ["--rollout-top-p", "a number > 0 and <= 1"]),
        (["--lr", "nan"], ["--lr", "'nan'", "a number"]),
        (["--lr", "inf"], ["--lr", "'inf'", "a number"]),
        (["--lr"], ["--lr", "needs a value", "a number >= 0"]),
        (["--lr", "1", "2"], ["--lr", "one value", "1 2"]),
        (["--lr-decay-style", "cosin"], ["one of constant, linear, cosine", "did you mean cosine?"]),
        (["--use-tis", "maybe"], ["--use-tis", "'maybe'", "true or false", "--no-use-tis"]),
        (["--no-use-tis", "true"], ["--no-use-tis takes no value"]),
        (["--no-lr"], ["unknown flag --no-lr"]),
        (["--rollout-stop"], ["at least one value", "--rollout-stop=[]"]),
        (["--rollout-stop-token-ids", "1", "x"], ["--rollout-stop-token-ids", "'x'", "integers"]),
        (["--apply-chat-template-kwargs", "{thinking}"], ["--apply-chat-template-kwargs", "not JSON"]),
        (["--apply-chat-template-kwargs", "[1]"], ["--apply-chat-template-kwargs", "a JSON object"]),
        (["lr", "1"], ["'lr' follows no flag", "did you mean --lr"]),
        (["mine/run.yaml"], ["'mine/run.yaml' follows no flag; did you mean --config mine/run.yaml?"]),
        (["--partial-rollout", "-lr", "1"], ["--partial-rollout takes one value", "did you mean --lr"]),
        (["--config"], ["--config needs the name of a YAML file"]),
        (
            ["--config", "a.yaml", "actor_rollout_ref.actor.optim.lr=1e-6", "trainer.nnodes=2"],
            ["--config takes one value, got 3", "; actor_rollout_ref.actor.optim.lr: use --lr", "; trainer.nnodes: use --actor-num-nodes"],
        ),
        (["--env", "PYTHONPATH=/code"], ["--env", "not JSON", 'such as \'{"NAME": "VALUE"}\'']),
        (["--learning-rate", "1"], ["unknown flag --learning-rate; use --lr"]),
        (["--num-generations", "8"], ["unknown flag --num-generations; use --n-samples-per-prompt"]),
        (["--temperature", "1"], ["unknown flag --temperature", "use --rollout-temperature (for evaluations: --eval-temperature)"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_name_the_flag_the_value_the_rule_and_the_fix(arguments: list[str], texts: list[str]) -> None:
    message = "\n".join(problems_of(arguments))
    for text in texts:
        assert text in message


def test_all_problems_are_reported_at_once() -> None:
    problems = problems_of(["--lr", "x", "--rolout-batch-size", "3", "--rollout-top-p", "2", "--seed"])
    assert len(problems) == 4
    for flag in ("--lr", "--rolout-batch-size", "--rollout-top-p", "--seed"):
        assert any(problem.startswith(flag) or f" {flag};" in problem for problem in problems)


def test_the_values_of_an_unknown_flag_are_not_blamed_on_others() -> None:
    assert len(problems_of(["--sead", "1", "2", "--lr", "1"])) == 1


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--lr", "1", "--lr=2"], ["--lr 1", "--lr=2"]),
        (["--use-tis", "--no-use-tis"], ["--use-tis", "--no-use-tis"]),
        (["--rollout-stop", "a", "b", "--rollout-stop", "c"], ["--rollout-stop a b", "--rollout-stop c"]),
    ],
)
def test_a_flag_given_twice_warns_and_the_last_counts(arguments: list[str], shown: list[str]) -> None:
    (warning,) = parse(arguments).warnings
    assert all(text in warning for text in shown)


def test_the_last_of_two_counts() -> None:
    assert value_of(["--lr", "1", "--lr", "2"], "lr") == 2.0
    assert value_of(["--use-tis", "--no-use-tis"], "use_tis") is False
    assert value_of(["--rollout-stop", "a", "b", "--rollout-stop", "c"], "rollout_stop") == ["c"]


def misspelt(option: str) -> list[str]:
    """Return misspellings with one letter missing, doubled, swapped or replaced, without those that are flags."""
    letters = range(2, len(option))
    typos = [option[:i] + option[i + 1 :] for i in letters]
    typos += [option[:i] + option[i] + option[i:] for i in letters]
    typos += [option[:i] + option[i + 1] + option[i] + option[i + 2 :] for i in letters if i + 1 < len(option)]
    typos += [option[:i] + "x" + option[i + 1 :] for i in letters]
    known = {flag.option for flag in flags().values()}
    return [typo for typo in typos if typo not in known]


@pytest.mark.parametrize("name", flags())
def test_a_typo_in_any_flag_is_an_error_that_suggests_the_flag(name: str) -> None:
    option = flags()[name].option
    # Three letters with one wrong resemble nothing. Every longer flag is found; for long ones, one typo suffices: a doubled letter or an x.
    typos = misspelt(option)
    for typo in typos[:: 1 if len(name) < 5 else 5] if len(name) < 8 else [typos[len(typos) // 3 if len(name) % 2 else -len(option) // 2]]:
        (problem,) = problems_of([typo])
        assert typo in problem
        assert f"{option} ({flags()[name].group})" in problem or len(name) <= 2


@given(st.lists(st.text(alphabet=st.characters(codec="utf-8"), max_size=12), max_size=8))
def test_no_arguments_crash_the_parser(arguments: list[str]) -> None:
    try:
        parse([argument for argument in arguments if not argument.startswith("--config")])
    except ConfigError as error:
        assert error.problems and all(error.problems)


@given(
    st.sampled_from([flag for flag in flags().values() if flag.kind is not Kind.JSON]),
    st.text(alphabet=st.characters(codec="utf-8"), max_size=8),
)
@example(flags()["sglang_config"], "\x00")
@example(flags()["sglang_config"], "")
def test_any_value_of_any_flag_is_taken_or_refused_by_name(flag, text: str) -> None:
    try:
        parse([f"{flag.option}={text}"])
    except ConfigError as error:
        (problem,) = error.problems
        assert flag.option in problem.partition(":")[0]


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("--lora-r", "use --lora-rank"),
        ("--lora", "use --lora-rank"),
        ("--output", "use --run-dir"),
        ("--model", "ORG/NAME on the Hub"),
        ("--offload", "use --offload-train; --colocate offloads the engines"),
        ("--ref-ckpt-step", "use --ref-load with the directory of that iteration"),
        ("--per_device_train_batch_size", "use --global-batch-size"),
        ("actor_rollout_ref.rollout.n=8", "use --n-samples-per-prompt"),
        ("--trainer.nnodes", "use --actor-num-nodes"),
        ("trainer.ray_wait_register_center_timeout=1", "docs/coming-from.md"),
        ("--dump-details", "remove it: every sample is saved"),
        ("--eval-input-key", "use --eval-config"),
        ("--top-p", "use --rollout-top-p"),
        ("--torch-dtype", "use --precision"),
        ("--sapo-temperature-neg", "fuligo lacks this loss"),
        ("actor_rollout_ref.actor.use_kl_loss=True", "--use-kl-loss, with verl's defaults --kl-loss-coef 0.001 --kl-loss-type low_var_kl"),
        ("--beta", "--use-kl-loss --kl-loss-coef BETA --kl-loss-type k3"),
        ("actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32", "use --moe-router-dtype"),
        ("+actor_rollout_ref.rollout.val_kwargs.temperature=0", "use --eval-temperature"),
        ("trainer.logger=wandb", "set --use-wandb"),
        ("critic.optim.lr=1e-5", "use --critic-lr"),
        ("critic.ppo_micro_batch_size_per_gpu=4", "the value model has the policy's layout"),
        ("actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2", "the reference model has the trainer's layout"),
        ("reward_model.model.path=RM", "use --rm-type remote_rm"),
        ("global_profiler.steps=2", "use --profile"),
        ("critic.cliprange_value=0.5", "use --value-clip"),
        ("critic.profiler.enable=True", "use --profile"),
        ("actor_rollout_ref.ref.model.path=REF", "use --ref-load"),
        ("--freeze-indexer", "remove it: indexers of sparse attention are never trained"),
        ("--rollout-skip-special-tokens", "never has special tokens"),
        ("actor_rollout_ref.rollout.seed=1", "use --rollout-seed"),
        ("actor_rollout_ref.actor.fsdp_config.seed=1", "use --seed"),
        ("reward.reward_manager.name=dapo", "use --rm-type"),
        ("reward_model.reward_manager=dapo", "use --rm-type"),
        ("data.datagen.name=mine", "docs/coming-from.md"),
        ("reward_model.overlong_buffer.len=4096", "use --extra-rm-path"),
        ("+reward_model.reward_kwargs.overlong_buffer_cfg.len=4096", "use --extra-rm-path"),
        ("+reward_model.reward_kwargs.max_resp_len=4096", "use --custom-config-path"),
        ("--max-steps", "max_steps counts optimizer steps"),
        ("--max-length", "supervised: --rollout-max-prompt-len"),
        ("actor_rollout_ref.actor.optim.total_training_steps=100", "use --lr-decay-iters"),
        ("trainer.total_training_steps=100", "use --num-rollout"),
        ("actor_rollout_ref.rollout.pipeline_model_parallel_size=2", "use --sglang-pp-size"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size=8", "use --micro-batch-size, which counts samples per GPU"),
        ("algorithm.rollout_correction.loss_type=ppo_clip", "--advantage-estimator chooses the loss"),
        ("algorithm.filter_groups.metric=acc", "use --dynamic-sampling-filter-path"),
        ("algorithm.kl_penalty=mse", "use --kl-loss-type (kl is k1, mse is k2)"),
        ("algorithm.kl_ctrl.type=adaptive", "fuligo has no adaptive KL coefficient"),
        ("algorithm.kl_ctrl.kl_coef=0.1", "; use --kl-coef"),
        ("data.reward_fn_key=data_source", "use --rm-type, or rm_type in a row's metadata"),
        ("--true-on-policy-mode", "use --exact-on-policy"),
        ("--qkv-format", "samples are always packed"),
        ("--adam-epsilon", "use --adam-eps"),
        ("--use-cpu", "use --device cpu"),
        ("--data-seed", "use --rollout-seed"),
    ],
)
def test_settings_of_other_frameworks_are_answered_with_ours(given: str, advice: str) -> None:
    (problem,) = problems_of([given])
    assert advice in problem
    assert "did you mean" not in problem


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"])
def test_losses_of_trl_are_answered_with_ours(loss_type: str, tmp_path: Path) -> None:
    """Also where TRL's setting is given by our flag of the same name."""
    (tmp_path / "run.yaml").write_text(f"algorithm: {{loss_type: {loss_type}}}\n")
    for arguments in ([f"loss_type={loss_type}"], ["--loss-type", loss_type], ["--config", str(tmp_path / "run.yaml")]):
        (problem,) = problems_of(arguments)
        assert other_settings()["values"][f"loss_type={loss_type}"] in problem


def test_a_value_of_no_framework_gets_no_advice() -> None:
    assert problems_of(["--loss-type", "huber"]) == (
        "--loss-type: 'huber' is not valid; it must be one of policy_loss, sft_loss, custom_loss (default: policy_loss)",
    )


def test_no_flag_is_answered_with_another() -> None:
    assert moved().keys() & flags().keys() == set()


@pytest.mark.parametrize("advice", sorted({advice for table in other_settings().values() for advice in table.values()}))
def test_advice_names_flags_that_exist(advice: str) -> None:
    named = [flag.lstrip("-").replace("-", "_") for flag in re.findall(r"--[a-z][a-z0-9-]+[a-z0-9]", advice)]
    assert [flag for flag in named if flag not in flags() and flag not in PASSED_ON] == []


@pytest.mark.parametrize("given", ["--max-workers", "--model-dir", "--block-size", "--repo-type", "--nothing-of-the-kind"])
def test_an_unknown_flag_that_resembles_none_gets_no_suggestion(given: str) -> None:
    assert problems_of([given]) == (f"unknown flag {given}; fuligo train --help lists the flags",)


def test_no_eval_drops_what_the_file_and_the_line_say_of_evaluation(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("eval: {eval_interval: 2, eval_prompt_data: [a.jsonl], n_samples_per_eval_prompt: 4}\n")
    arguments = ["--config", str(tmp_path / "run.yaml"), "--eval-temperature", "0"]
    assert parse(arguments).config.has_eval
    config = parse([*arguments, "--no-eval"]).config
    assert config.eval.model_dump() == {**Config().eval.model_dump(), "eval": False}


def test_no_eval_keeps_a_config_with_a_reward_key_of_evaluations_valid(tmp_path: Path) -> None:
    run = "reward: {custom_rm_path: mine.reward, reward_key: score, eval_reward_key: right}\neval: {eval_prompt_data: [a.jsonl]}\n"
    (tmp_path / "run.yaml").write_text(run)
    config = parse(["--config", str(tmp_path / "run.yaml"), "--no-eval"]).config
    assert not any("eval_reward_key" in str(finding.fix) for rule in effects.RULES for finding in rule.check(config))


def test_a_flag_replaces_the_file_s_other_way_to_set_the_same(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("data:\n  num_epoch: 3\nreward:\n  rm_type: math\n")
    parsed = parse(["--config", str(file), "--num-rollout", "20", "--custom-rm-path", "none"])
    assert (parsed.config.data.num_rollout, parsed.config.data.num_epoch, parsed.config.reward.rm_type) == (20, None, "math")
    assert parsed.warnings == (f"--num-rollout 20 replaces {file} line 2, data.num_epoch: 3",)
    unset = tmp_path / "recorded.yaml"  # as a run writes its configuration
    unset.write_text("data: {num_rollout: 30, num_epoch: null}\n")
    parsed = parse(["--config", str(unset), "--num-rollout", "20"])
    assert (parsed.config.data.num_rollout, parsed.config.data.num_epoch, parsed.warnings) == (20, None, ())
    both = parse(["--config", str(file), "--num-rollout", "20", "--num-epoch", "3"]).config
    assert (both.data.num_rollout, both.data.num_epoch) == (20, 3), "given together, they are a contradiction to report"


def test_flags_of_the_file_that_the_line_leaves_idle_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("algorithm:\n  use_kl_loss: true\n  kl_loss_coef: 0.1\neval:\n  eval_prompt_data: [a.jsonl]\n  eval_interval: 2\n")
    parsed = parse(["--config", str(file), "--no-use-kl-loss", "--eval-prompt-data", "none"])
    assert (parsed.config.algorithm.kl_loss_coef, parsed.config.eval.eval_interval) == (0, None)
    assert sorted(parsed.warnings) == [
        f"left out: --eval-interval 2 has no effect without evaluation data ({file} line 6)",
        f"left out: --kl-loss-coef 0.1 has no effect without --use-kl-loss ({file} line 3)",
    ]
    assert [violation for rule in effects.RULES for violation in rule.check(parsed.config)] == []
    kept = parse(["--config", str(file), "--lr", "1"]).config
    assert (kept.algorithm.kl_loss_coef, kept.eval.eval_interval) == (0.1, 2)


def test_flags_that_are_idle_in_the_file_itself_or_on_the_line_stay_an_error(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("algorithm: {use_kl_loss: true}\nobservability: {wandb_group: mine}\n")
    parsed = parse(["--config", str(file), "--no-use-kl-loss", "--kl-loss-coef", "0.1"])
    assert parsed.warnings == ()
    idle = {option for rule in effects.RULES for violation in rule.check(parsed.config) for option in violation.flags}
    assert idle == {"--wandb-group", "--kl-loss-coef"}


def test_a_finding_about_a_flag_of_the_file_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("eval:\n  n_samples_per_eval_prompt: 4\n  eval_temperature: 0.5\nobservability:\n  wandb_group: mine\n")

    def shown(*arguments: str) -> list[str]:
        parsed = parse(["--config", str(file), *arguments])
        return [finding.text for finding in with_places(findings(parsed.config), parsed.places)]

    found = "\n".join(shown())
    assert f"evaluation data (--n-samples-per-eval-prompt: {file} line 2; --eval-temperature: {file} line 3)" in found
    assert f"--wandb-group mine has no effect without --use-wandb ({file} line 5)" in found
    typed = "\n".join(shown("--wandb-group", "other"))
    assert "--wandb-group other has no effect without --use-wandb" in typed
    assert f"{file} line 5" not in typed
