"""Sweep of the quickstart's learning rate and temperature with Optuna.

Each trial is a run, and runs that fall behind the others are stopped early.

    pip install optuna
    python examples/sweep/optuna_sweep.py --trials 6

The study is stored in `runs/sweep/study.db`: the same command adds trials to it, and several commands may share it.
`fuligo view runs/sweep` shows the runs.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import optuna

import fuligo

ASSETS = Path(fuligo.__file__).parent / "quickstart" / "assets"
METRIC = "eval/held_out/mean@2"


def evaluations(run_dir: Path) -> list[tuple[int, float]]:
    """Return (complete rollouts, accuracy) of the evaluations so far."""
    file = run_dir / "eval" / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(record["num_rollouts"], record[METRIC]) for record in records]


def objective(trial: optuna.Trial, folder: Path, rollouts: int) -> float:
    """Run one trial and return its last accuracy. Raises TrialPruned if the pruner stops it early."""
    run_dir = folder / f"trial-{trial.number:03d}"
    flags = {
        "--config": ASSETS / "config.yaml",
        "--hf-checkpoint": ASSETS / "model",
        "--prompt-data": ASSETS / "train.jsonl",
        "--lr": trial.suggest_float("lr", 1e-6, 1e-3, log=True),
        "--rollout-temperature": trial.suggest_float("temperature", 0.7, 1.2),
        "--eval-temperature": 1,
        "--num-rollout": rollouts,
        "--eval-interval": 2,
        "--run-dir": run_dir,
        "--progress": "none",
    }
    held_out = ["--eval-prompt-data", "held_out", f"{ASSETS / 'test.jsonl'}@[:48]"]
    command = [sys.executable, "-m", "fuligo", "train", *(str(word) for pair in flags.items() for word in pair), *held_out]
    num_reported = 0
    with subprocess.Popen(command) as run:
        while True:
            is_over = run.poll() is not None
            for num_rollouts, accuracy in evaluations(run_dir)[num_reported:]:
                trial.report(accuracy, num_rollouts)
                num_reported += 1
            if is_over:
                break
            if trial.should_prune():
                run.terminate()  # the run ends, and its directory stays
                raise optuna.TrialPruned
            time.sleep(0.5)
    if run.returncode:
        raise subprocess.CalledProcessError(run.returncode, command)
    return evaluations(run_dir)[-1][1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--rollouts", type=int, default=12, help="rollouts per trial")
    parser.add_argument("--folder", type=Path, default=Path("runs/sweep"))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name="quickstart",
        direction="maximize",
        storage=f"sqlite:///{options.folder / 'study.db'}",
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(constant_liar=True),  # without a seed: commands that share the study draw different values
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2),
    )
    study.optimize(lambda trial: objective(trial, options.folder, options.rollouts), n_trials=options.trials)
    for trial in study.trials:
        print(trial.number, trial.state.name.lower(), trial.params, trial.value)
    print("best:", study.best_trial.number, study.best_params, study.best_value)


if __name__ == "__main__":
    main()
