"""Driver's part of a checkpoint: everything needed to resume, apart from the trainer's state."""

import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import orjson

from fuligo.errors import CheckpointError, DataError
from fuligo.rollout.debug_data import decode_groups, encode_groups
from fuligo.rollout.protocol import RolloutState

FORMAT = 1
"""Version of the format of these files, recorded in `state.json`."""
STATE = "state.json"
BUFFER = "buffer.parquet"
CONFIG = "config.yaml"


@dataclass(slots=True, frozen=True)
class DriverRng:
    """State of the driver's global random generators, which hooks may use."""

    python: tuple[Any, ...]
    """Result of `random.getstate()`."""
    numpy: dict[str, Any]
    """Result of `numpy.random.get_state(legacy=False)`, with the key as a list."""

    @classmethod
    def capture(cls) -> Self:
        state = np.random.get_state(legacy=False)
        assert isinstance(state, dict)
        return cls(random.getstate(), {**state, "state": {**state["state"], "key": state["state"]["key"].tolist()}})

    def restore(self) -> None:
        version, internal, gauss = self.python
        random.setstate((version, tuple(internal), gauss))
        key = np.array(self.numpy["state"]["key"], np.uint32)
        np.random.set_state({**self.numpy, "state": {**self.numpy["state"], "key": key}})


@dataclass(slots=True, frozen=True)
class RunState:
    """Driver's part of a checkpoint, stored as JSON and parquet."""

    step: int
    """Index of the next rollout, which is the number of complete rollouts."""
    policy_version: int
    """Policy version of the checkpoint's weights."""
    rollout: RolloutState
    config: str
    """YAML config of the run that saved the checkpoint, to compare with the resumed run's config."""
    rng: DriverRng = field(default_factory=DriverRng.capture)

    def write(self, directory: Path) -> None:
        state = {
            "format": FORMAT,
            "step": self.step,
            "policy_version": self.policy_version,
            "source": self.rollout.source,
            "next_sample_index": self.rollout.next_sample_index,
            "next_group_index": self.rollout.next_group_index,
            "rng": asdict(self.rng),
        }
        (directory / STATE).write_bytes(orjson.dumps(state, option=orjson.OPT_INDENT_2))
        (directory / BUFFER).write_bytes(encode_groups(self.rollout.buffer))
        (directory / CONFIG).write_text(self.config, encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read the state from a checkpoint directory. Raises CheckpointError if it is damaged or another version of fuligo wrote it."""
        path = directory / STATE
        try:
            state = orjson.loads(path.read_bytes())
            if state["format"] != FORMAT:
                raise CheckpointError(
                    f"cannot read {path}: it has format {state['format']}, but this version reads {FORMAT}; use the version that wrote it"
                )
            rollout = RolloutState(
                state["source"], state["next_sample_index"], state["next_group_index"], decode_groups((directory / BUFFER).read_bytes())
            )
            config = (directory / CONFIG).read_text(encoding="utf-8")
            return cls(state["step"], state["policy_version"], rollout, config, DriverRng(**state["rng"]))
        except (OSError, orjson.JSONDecodeError, KeyError, TypeError, DataError) as error:
            raise CheckpointError(
                f"cannot read {path}: {error!r}; the checkpoint is damaged; resume from another one with --ckpt-step"
            ) from None
