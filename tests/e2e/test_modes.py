"""Modes of a run, and what must be equal between them."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fuligo.formats.checkpoint_files import TRACKER
from tests import tiny
from tests.e2e.command import REPOSITORY, fail, succeed, train_command
from tests.e2e.conftest import Job
from tests.e2e.records import TOKENS, checkpoint, evaluations, metrics, sample_rows

TWO_STEPS = {"num_steps_per_rollout": 2}


@pytest.fixture(scope="module")
def full(job: Job, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run with every output that a run can write; return the directory that holds `run/` and the outputs beside it."""
    directory = tmp_path_factory.mktemp("full")
    short = directory / "short.jsonl"
    short.write_text("".join(prompts.read_text().splitlines(keepends=True)[:3]))
    eval_sets = {
        "defaults": {"input_key": "prompt", "label_key": "label"},
        "datasets": [
            {"name": "greedy", "path": f"{prompts}@[0:2]", "temperature": 1e-6, "rm_type": "math"},
            {"name": "varied", "path": str(short), "n_samples_per_eval_prompt": 2, "max_response_len": 5},
        ],
    }
    (directory / "eval.yaml").write_text(json.dumps({"eval": eval_sets}))
    succeed(
        *job(
            **TWO_STEPS,
            eval_config=directory / "eval.yaml",
            eval_interval=2,
            check_weight_update_equal=True,
            use_tensorboard=True,
            save_interval=1,
            keep_checkpoints=1,
            save_hf=directory / "hf" / "{rollout_id}",
            save_debug_rollout_data=directory / "rollouts" / "{rollout_id}.parquet",
            run_dir=directory / "run",
        )
    )
    return directory


def test_what_a_run_leaves_behind(full: Path) -> None:
    run_dir = full / "run"
    records = metrics(run_dir)
    assert [record["policy_version"] for record in records] == [1, 2, 3]
    assert all(record["train/grad_norm"] > 0 and record["train/logprob_abs_diff"] < 1e-4 for record in records)

    assert [record["num_rollouts"] for record in evaluations(run_dir)] == [0, 2, 3]
    last = evaluations(run_dir)[-1]
    assert {"eval/greedy/mean@1", "eval/varied/mean@2", "eval/varied/pass@2"} <= last.keys()
    assert last["eval/varied/response_len_mean"] <= 5 < last["eval/greedy/response_len_mean"]

    kept = checkpoint(run_dir, 3)
    assert [path.name for path in (run_dir / "checkpoints").iterdir() if path.is_dir()] == [kept.name], "--keep-checkpoints 1"
    assert (run_dir / "checkpoints" / TRACKER).read_text() == "3"


def test_tensorboard_has_the_steps_and_the_evaluations(full: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = event_accumulator.EventAccumulator(str(full / "run" / "tensorboard"))
    events.Reload()
    curve = {scalar.step: scalar.value for scalar in events.Scalars("eval/varied/mean@2")}
    assert curve == pytest.approx({record["num_rollouts"]: record["eval/varied/mean@2"] for record in evaluations(full / "run")})
    assert len(events.Scalars("rollout/reward_mean")) == 3


def test_exported_weights_load_in_transformers_and_are_those_that_sample_next(full: Path) -> None:
    """The weights exported after the first step reproduce the engine's log-probabilities of the second step."""
    model = AutoModelForCausalLM.from_pretrained(full / "hf" / "0").float()
    assert AutoTokenizer.from_pretrained(full / "hf" / "0").chat_template is not None
    rows = sample_rows(full / "run", "prompt_ids", "response_ids", "engine_logprobs", "versions")
    for row in [row for row in rows if row["step"] == 1][:3]:
        assert set(row["versions"]) == {1}
        with torch.no_grad():
            logits = model(torch.tensor([row["prompt_ids"] + row["response_ids"]])).logits[0, len(row["prompt_ids"]) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(row["response_ids"])[:, None])[:, 0]
        np.testing.assert_allclose(row["engine_logprobs"], expected, atol=1e-4)


def test_a_longer_run_continues_a_shorter_one_and_weights_may_go_by_disk(full: Path, job: Job, tmp_path: Path) -> None:
    """Two rollouts and a third by raising --num-rollout equal three at once, whose weights travel by tensor."""
    run_dir = tmp_path / "run"
    flags = {**TWO_STEPS, "check_weight_update_equal": True, "update_weight_transport": "disk", "run_dir": run_dir}
    succeed(*job(**flags, num_rollout=2))
    succeed(*job(**flags, num_rollout=3, load=run_dir / "checkpoints"))
    assert metrics(run_dir) == metrics(full / "run")
    assert sample_rows(run_dir, *TOKENS) == sample_rows(full / "run", *TOKENS)


@pytest.mark.slow  # tests/parity/test_torch_trainer_ranks.py compares two ranks with one, test_restarts.py the weights that they send
def test_two_ranks_train_as_one(full: Path, job: Job, tmp_path: Path) -> None:
    succeed(*job(**TWO_STEPS, actor_num_gpus_per_node=2, check_weight_update_equal=True, run_dir=tmp_path / "run"))
    for two, one in zip(metrics(tmp_path / "run"), metrics(full / "run"), strict=True):
        compared = one.keys() - {"train/num_micro_batches"}
        assert {key: two[key] for key in compared} == pytest.approx({key: one[key] for key in compared}, rel=1e-5, abs=1e-5)
    weights = [AutoModelForCausalLM.from_pretrained(checkpoint(run, 3) / "hf").state_dict() for run in (tmp_path / "run", full / "run")]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-3, atol=1e-5)


def test_debug_rollout_only_samples_what_a_whole_run_does(full: Path, job: Job, tmp_path: Path) -> None:
    succeed(*job(num_rollout=1, run_dir=tmp_path / "run"), "--debug-rollout-only")
    sampled = ("index", "response_ids", "engine_logprobs", "reward")
    assert sample_rows(tmp_path / "run", *sampled) == [row for row in sample_rows(full / "run", *sampled) if row["step"] == 0]
    (record,) = metrics(tmp_path / "run")
    assert not any(key.startswith("train/") for key in record)
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


@pytest.fixture
def train_on_saved(full: Path, job: Job, tmp_path: Path):
    """Train on the full run's rollouts with changed flags and no engine; return the metrics."""

    def train(**changes: object) -> list[dict]:
        rollouts = full / "rollouts" / "{rollout_id}.parquet"
        flags = {"debug_train_only": True, "load_debug_rollout_data": rollouts, "embedded_num_threads": None, "run_dir": tmp_path / "run"}
        succeed(*job(**{**flags, **changes}))
        return metrics(tmp_path / "run")

    return train


def test_debug_train_only_trains_as_a_whole_run_does(full: Path, train_on_saved) -> None:
    assert train_on_saved(**TWO_STEPS) == metrics(full / "run")


def test_samples_without_advantage_change_no_step(train_on_saved, tmp_path: Path) -> None:
    """Over three rollouts of two optimizer steps each, the weights equal those of a run that trains on all samples."""
    flags = {**TWO_STEPS, "custom_reward_post_process_path": "tests.e2e.rewards.without_first_group"}
    runs = tmp_path / "run", tmp_path / "whole"
    train_on_saved(**flags, run_dir=runs[0])
    train_on_saved(**flags, no_skip_zero_advantages=True, run_dir=runs[1])
    skipped, whole = map(metrics, runs)
    assert [record["train/skipped_share"] for record in skipped] == [0.25] * 3
    assert not any("skipped" in key for record in whole for key in record)
    assert [record["train/grad_norm"] for record in skipped] == pytest.approx([record["train/grad_norm"] for record in whole], rel=1e-4)
    skipped, whole = (AutoModelForCausalLM.from_pretrained(checkpoint(run, 3) / "hf").state_dict() for run in runs)
    for name, tensor in whole.items():
        torch.testing.assert_close(skipped[name], tensor, rtol=0, atol=1e-4)  # a tenth of the learning rate


def test_a_rollout_without_advantages_skips_training(job: Job, checkpoint: Path, tmp_path: Path) -> None:
    """No pass runs and the weights stay as they are, also in a run that resumes from the checkpoint."""
    run_dir = tmp_path / "run"
    flags = {"custom_rm_path": "tests.e2e.rewards.always_wrong", "rm_type": None, "run_dir": run_dir}
    shown = succeed(*job(**flags, num_rollout=1))
    assert "skipped training (all advantages are 0)" in shown
    succeed(*job(**flags, num_rollout=2, load=run_dir / "checkpoints"))
    for record in metrics(run_dir):
        own = {key: value for key, value in record.items() if key.startswith("train/")}
        assert own.pop("train/logprob_abs_diff") < 1e-4, "engines with wrong weights would earn no reward, too"
        assert own == {"train/skipped_share": 1.0, "train/num_skipped_steps": 1}
    assert "forward, backward" not in (run_dir / "trace.json").read_text()
    untrained = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    trained = AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints" / "iter_0000002" / "hf").state_dict()
    assert all(torch.equal(trained[name], weight) for name, weight in untrained.items())


@pytest.mark.parametrize(
    ("flags", "reported"),
    [
        ({"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl", "use_tis": True}, {"kl", "kl_loss", "tis_mean"}),
        (
            {"advantage_estimator": "gspo", "eps_clip": 3e-4, "entropy_coef": 0.01, "use_opsm": True, "opsm_delta": 0.0},
            {"clip_fraction", "entropy_loss", "opsm_masked_fraction"},
        ),
        pytest.param(
            {"advantage_estimator": "cispo", "use_tis": True, "tis_mode": "icepop"},
            {"clip_fraction", "tis_cut_fraction"},
            marks=pytest.mark.slow,
        ),
        pytest.param({"advantage_estimator": "rloo", "calculate_per_token_loss": True}, {"pg_loss"}, marks=pytest.mark.slow),
        pytest.param(
            {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "kl_coef": 0.01}, {"kl"}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"advantage_estimator": "reinforce_plus_plus_baseline", "normalize_advantages": True}, {"pg_loss"}, marks=pytest.mark.slow
        ),
    ],
    ids=lambda value: value.get("advantage_estimator", "grpo") if isinstance(value, dict) else "",
)
def test_every_estimator_and_correction_trains(flags: dict, reported: set[str], train_on_saved) -> None:
    """tests/parity has their arithmetic, tests/unit/trainer/test_settings.py the way of every flag."""
    records = train_on_saved(**TWO_STEPS, **flags, num_rollout=2)
    assert len(records) == 2
    for record in records:
        assert reported <= {key.removeprefix("train/") for key in record}
        assert all(math.isfinite(value) for key, value in record.items() if key.startswith("train/"))
        assert record["train/grad_norm"] > 0


def test_one_step_ahead(job: Job, tmp_path: Path) -> None:
    """Rollout k is sampled while the trainer works on k - 1, with the weights of step k - 2."""
    succeed(*job(async_mode="one-step", use_tis=True, update_weight_transport="tensor", num_rollout=4, run_dir=tmp_path / "run"))
    assert [record["policy_version"] for record in metrics(tmp_path / "run")] == [1, 2, 3, 4]
    sampled_by = {row["step"]: set(row["versions"]) for row in sample_rows(tmp_path / "run", "versions")}
    assert sampled_by == {0: {0}, 1: {0}, 2: {1}, 3: {2}}
    assert (checkpoint(tmp_path / "run", 4) / "hf" / "config.json").exists()


def test_sampling_that_never_stops_stays_within_its_bound(job: Job, prompts: Path, tmp_path: Path) -> None:
    run_dir, max_staleness, num_rollout = tmp_path / "run", 2, 9
    evaluation = {"eval_prompt_data": ["sums", f"{prompts}@[0:4]"], "eval_interval": 5}
    succeed(*job(async_mode="full", max_staleness=max_staleness, use_tis=True, num_rollout=num_rollout, **evaluation, run_dir=run_dir))
    assert [record["num_rollouts"] for record in evaluations(run_dir)] == [0, 5, 9]
    assert_within_bound(run_dir, max_staleness, num_rollout)


def assert_within_bound(run_dir: Path, max_staleness: int, num_rollout: int) -> None:
    """Check that the run samples ahead, by at most the bound, and that its metrics say how far."""
    records = metrics(run_dir)
    assert [record["policy_version"] for record in records] == list(range(1, num_rollout + 1))
    kept = [row for row in sample_rows(run_dir, "kept", "versions") if row["kept"]]
    staleness = [row["step"] - min(row["versions"]) for row in kept]
    assert min(staleness) == 0 and 1 <= max(staleness) <= max_staleness
    assert max(record["rollout/staleness_max"] for record in records) == max(staleness)


@pytest.mark.slow  # test_quickstart.py covers learning, the test above what differs
def test_sampling_that_never_stops_learns(tmp_path: Path) -> None:
    """The quickstart's task with evaluations."""
    assets = REPOSITORY / "fuligo" / "quickstart" / "assets"
    run_dir, max_staleness, num_rollout = tmp_path / "run", 2, 9
    succeed(
        *("train", "--config", assets / "config.yaml", "--hf-checkpoint", assets / "model", "--prompt-data", assets / "train.jsonl"),
        *("--async-mode", "full", "--max-staleness", max_staleness, "--use-tis", "--num-rollout", num_rollout, "--run-dir", run_dir),
        *("--eval-prompt-data", "sums", f"{assets / 'test.jsonl'}@[0:32]", "--eval-interval", 5, "--progress", "plain"),
    )
    records = metrics(run_dir)
    rewards = [record["rollout/reward_mean"] for record in records]
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.2
    first, last = (evaluations(run_dir)[end]["eval/sums/mean@2"] for end in (0, -1))
    assert last > first + 0.2
    assert_within_bound(run_dir, max_staleness, num_rollout)


def test_requests_that_a_weight_sync_interrupts_continue_where_they_stopped(job: Job, tmp_path: Path) -> None:
    """The engine is slow, so that many syncs interrupt requests; weights barely change, so that all versions' log-probabilities agree."""
    run_dir = tmp_path / "run"
    slow = {"rollout_max_response_len": 120, "embedded_max_running_requests": 6, "lr": 1e-12, "no_skip_zero_advantages": True}
    succeed(*job(**slow, async_mode="full", max_staleness=3, use_tis=True, num_rollout=4, run_dir=run_dir))
    kept = [row for row in sample_rows(run_dir, "kept", "versions", "engine_logprobs", "trainer_logprobs") if row["kept"]]
    interrupted = [row for row in kept if len(set(row["versions"])) > 1]
    assert interrupted
    for row in interrupted:
        assert row["versions"] == sorted(row["versions"])
        np.testing.assert_allclose(row["engine_logprobs"], row["trainer_logprobs"], atol=1e-4)
    assert sum(record["rollout/num_resumed"] for record in metrics(run_dir)) == len(interrupted)


def test_supervised_training_lowers_its_loss(job: Job, prompts: Path, tmp_path: Path) -> None:
    """The labels are the assistant's answers; evaluations work as in any run."""
    command = job(
        loss_type="sft_loss",
        n_samples_per_prompt=None,
        rollout_batch_size=8,
        num_rollout=10,
        lr=3e-3,
        rm_type="math",
        eval_prompt_data=["held_out", f"{prompts}@[0:2]"],
        run_dir=tmp_path / "run",
    )
    succeed(*command)
    losses = [record["train/loss"] for record in metrics(tmp_path / "run")]
    assert losses[0] == pytest.approx(math.log(400), rel=0.5), "an untrained model guesses among 400 tokens"
    assert losses[-1] < 0.6 * losses[0]
    assert [record["num_rollouts"] for record in evaluations(tmp_path / "run")] == [0, 10]


@pytest.mark.slow  # tests/unit/trainer/test_shared_gradients.py compares the metrics; runs with shared prefixes are exact below
def test_shared_prefixes_change_no_metric(job: Job, tmp_path: Path) -> None:
    flags = {**TWO_STEPS, "use_kl_loss": True, "kl_loss_coef": 0.1, "max_tokens_per_gpu": 128, "num_rollout": 2}
    for choice in ("on", "off"):
        succeed(*job(**flags, share_prefixes=choice, run_dir=tmp_path / choice))
    for shared, plain in zip(metrics(tmp_path / "on"), metrics(tmp_path / "off"), strict=True):
        assert shared.pop("train/shared_prefix_share") > 0.2
        for record in (shared, plain):
            record.pop("train/num_micro_batches")
        assert shared == pytest.approx(plain, rel=1e-5, abs=1e-5)


def test_shared_prefixes_are_refused_where_layers_carry_a_state(prompts: Path, tmp_path: Path) -> None:
    checkpoint = tiny.save_checkpoint(tmp_path / "model", "qwen3_5_text")
    told = fail(2, *train_command(checkpoint, prompts, share_prefixes="on", run_dir=tmp_path / "run"))
    assert "--share-prefixes on does not support the model: its linear attention has one state per sequence" in told


@pytest.mark.parametrize(
    "flags",
    [
        {"use_kl_loss": True, "kl_loss_coef": 0.1, "rollout_temperature": 0.8, "gradient_checkpointing": True},
        {**TWO_STEPS, "actor_num_gpus_per_node": 2, "precision": "bf16", "embedded_dtype": "bf16"},
        {"family": "qwen3_moe", "share_prefixes": "on", "use_tis": True, "actor_num_gpus_per_node": 2},
    ],
    ids=["float32", "2 ranks in bfloat16", "2 ranks of experts with shared prefixes"],
)
def test_the_trainer_reproduces_the_engine_to_the_bit(prompts: Path, job: Job, tmp_path: Path, flags: dict[str, object]) -> None:
    given = {"exact_on_policy": True, "num_rollout": 2, "run_dir": tmp_path / "run", **flags}
    family = given.pop("family", None)
    if family is None:
        succeed(*job(**given))
    else:
        succeed(*train_command(tiny.save_checkpoint(tmp_path / "model", str(family)), prompts, **given))
    records = metrics(tmp_path / "run")
    assert not flags.get("share_prefixes") or all(record["train/shared_prefix_share"] > 0.1 for record in records)
    assert not flags.get("use_tis") or all(record["train/tis_mean"] == 1.0 for record in records)
    assert [record["train/logprob_abs_diff"] for record in records] == [0.0, 0.0]
    assert all(record["train/grad_norm"] > 0 for record in records)


def test_a_difference_of_one_bit_ends_an_exact_run(job: Job, tmp_path: Path) -> None:
    hook = {"before_train_step_path": "tests.e2e.rewards.change_one_bit"}
    told = fail(1, *job(**hook, exact_on_policy=True, num_rollout=1, run_dir=tmp_path / "run"))
    assert "cannot keep --exact-on-policy: sample 3 (prompt 0), response token 0: the engine's log-probability is" in told
    assert "1 of" in told
    assert not list((tmp_path / "run" / "checkpoints").glob("iter_*"))
