"""Origin of a run, and the recorded steps that it may replace."""

import random
from dataclasses import replace
from pathlib import Path

from fuligo.checkpoint.state import DriverRng
from fuligo.checkpoint.store import CheckpointStore
from fuligo.config.command_line import parse
from fuligo.job.origin import Origin
from tests.unit.checkpoint.conftest import make_state


def may_cut_back(origin: Origin, tmp_path: Path, *flags: object) -> bool:
    run_dir = tmp_path / "run"
    return origin.may_cut_back(parse(["--run-dir", str(run_dir), *map(str, flags)]).config, run_dir)


def test_recorded_steps_give_way_to_a_checkpoint_or_to_a_start_where_nothing_was_saved(tmp_path: Path) -> None:
    begins = Origin(0, 0, tmp_path / "model", None, None)
    resumes = replace(begins, step=4, checkpoint=tmp_path / "elsewhere" / "iter_0000004")
    assert may_cut_back(resumes, tmp_path, "--load", tmp_path / "elsewhere")
    assert may_cut_back(begins, tmp_path, "--load", tmp_path / "run" / "checkpoints"), "the run ended before its first checkpoint"
    assert may_cut_back(begins, tmp_path, "--load", tmp_path / "own", "--save", tmp_path / "own")


def test_recorded_steps_do_not_give_way_to_a_load_without_checkpoints(tmp_path: Path) -> None:
    begins = Origin(0, 0, tmp_path / "model", None, None)
    assert not may_cut_back(begins, tmp_path)
    assert not may_cut_back(begins, tmp_path, "--load", tmp_path / "run" / "chekpoints")
    assert not may_cut_back(begins, tmp_path, "--load", tmp_path / "model"), "weights alone"


def test_weights_to_read_include_the_reference_and_the_checkpoint(tmp_path: Path) -> None:
    flags = ["--hf-checkpoint", str(tmp_path / "model"), "--ref-load", str(tmp_path / "first")]
    begins = Origin(0, 0, tmp_path / "loaded", None, None)
    assert begins.weights_to_read(parse(flags).config) == [tmp_path / "loaded"]
    resumes = replace(begins, checkpoint=tmp_path / "iter_0000004")
    read = resumes.weights_to_read(parse([*flags, "--use-kl-loss"]).config)
    assert read == [tmp_path / "loaded", tmp_path / "iter_0000004", tmp_path / "first"]


async def test_a_restart_begins_at_what_this_run_saved(tmp_path: Path) -> None:
    async def write(directory: Path) -> None:
        (directory / "hf").mkdir()

    await CheckpointStore(tmp_path).save(9, write, make_state(9))
    store, begins = CheckpointStore(tmp_path), Origin(0, 0, tmp_path / "model", None, None)
    assert begins.after_saving_to(store) is begins, "another run saved iteration 9"
    for iteration in (2, 4):
        await store.save(iteration, write, make_state(iteration))
    origin = begins.after_saving_to(store)
    assert (origin.step, origin.policy_version) == (4, 5)
    assert (origin.checkpoint, origin.initial_weights) == (tmp_path / "iter_0000004", begins.initial_weights)
    assert origin.state is not None and origin.state.rollout.buffer[0].row == 5


def test_a_restart_from_the_beginning_draws_the_same_numbers(tmp_path: Path) -> None:
    begins = Origin(0, 0, tmp_path / "model", None, None)
    drawn = random.random()
    begins.rng.restore()
    assert random.random() == drawn
    assert isinstance(begins.rng, DriverRng)
