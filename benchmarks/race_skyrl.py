"""SkyRL's trainer as a competitor of `race.py`, in its own environment: race_skyrl.py STEPS.jsonl SETTING=VALUE..."""

import json
import socket
import sys
from pathlib import Path

import ray
from race_work import score
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.tracking import Tracking
from skyrl.train.utils.utils import initialize_ray
from skyrl_gym.envs import register
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

METRICS = ("reward/avg_raw_reward", "generate/avg_num_tokens")
PROMETHEUS_PORT = "generator.inference_engine.router_init_kwargs.prometheus_port"


class RaceEnvironment(BaseTextEnv):
    """Environment of one turn that scores an answer against the label of its prompt."""

    def __init__(self, env_config: object = None, extras: dict | None = None) -> None:
        super().__init__()
        self._label = (extras or {})["label"]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        return BaseTextEnvStepOutput(observations=[], reward=score(action, self._label), done=True, metadata={})


class Records(Tracking):
    """Tracker that also writes one line per step."""

    def __init__(self, file: Path, cfg: SkyRLTrainConfig) -> None:
        super().__init__(cfg.trainer.project_name, cfg.trainer.run_name, cfg.trainer.logger, cfg)
        self._file = file.open("w", buffering=1)

    def log(self, data: dict, step: int, commit: bool = False) -> None:
        super().log(data, step, commit)
        self._file.write(json.dumps({name: data[name] for name in METRICS}) + "\n")


class RaceExperiment(BasePPOExp):
    """SkyRL's experiment with the race's tracker."""

    def __init__(self, cfg: SkyRLTrainConfig, steps: Path) -> None:
        super().__init__(cfg)
        self._steps = steps

    def get_tracker(self) -> Records:
        return Records(self._steps, self.cfg)


@ray.remote(num_cpus=1)
def train(cfg: SkyRLTrainConfig, steps: Path) -> None:
    register(id="race", entry_point=RaceEnvironment)
    RaceExperiment(cfg, steps).run()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def settings(words: list[str]) -> SkyRLTrainConfig:
    """Return SkyRL's checked configuration; the router's statistics get a free port, since several races may run on one machine."""
    cfg = SkyRLTrainConfig.from_cli_overrides([f"{PROMETHEUS_PORT}={free_port()}", *words])
    validate_cfg(cfg)
    return cfg


def main() -> None:
    steps, cfg = Path(sys.argv[1]), settings(sys.argv[2:])
    initialize_ray(cfg)
    ray.get(train.remote(cfg, steps))


if __name__ == "__main__":
    main()
