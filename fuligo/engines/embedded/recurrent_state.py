"""State of linear attention layers, of constant size per request: the last inputs of the convolution, and a matrix per head."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FEWEST_ROWS = 16


@dataclass(slots=True, frozen=True)
class RecurrentShape:
    """Shape of the states of a model's linear attention layers."""

    layers: tuple[int, ...]
    """Numbers of these layers, among all layers of the model."""
    num_channels: int
    num_inputs: int
    """Earlier inputs that the convolution reads: its width - 1."""
    num_heads: int
    key_dim: int
    value_dim: int


class RecurrentRows:
    """States of the requests in one KV pool; rows are numbered as in the pool."""

    def __init__(self, shape: RecurrentShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        num_layers = len(shape.layers)
        self.windows = torch.zeros(num_layers, 0, shape.num_channels, shape.num_inputs, dtype=dtype, device=device)
        """Latest inputs of the convolutions: [layers, rows, C, inputs]"""
        self.states = torch.zeros(num_layers, 0, shape.num_heads, shape.key_dim, shape.value_dim, device=device)
        """Recurrent states: [layers, rows, H, Dk, Dv] float32"""

    def window(self, layer: int) -> Tensor:
        """Return a view [rows, C, inputs] of a layer's convolution inputs."""
        return self.windows[self.shape.layers.index(layer)]

    def state(self, layer: int) -> Tensor:
        """Return a view [rows, H, Dk, Dv] of a layer's states."""
        return self.states[self.shape.layers.index(layer)]

    def make_room(self, num_rows: int) -> None:
        held = self.states.shape[1]
        if num_rows > held:
            num_more = max(FEWEST_ROWS, num_rows, 2 * held) - held
            self.windows, self.states = (
                torch.cat([rows, rows.new_zeros(rows.shape[0], num_more, *rows.shape[2:])], 1) for rows in (self.windows, self.states)
            )

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        self.put(self.take(source), target)

    def take(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return a copy of some rows."""
        return self.windows[:, list(rows)], self.states[:, list(rows)]

    def put(self, taken: tuple[Tensor, Tensor], rows: Sequence[int]) -> None:
        self.windows[:, list(rows)], self.states[:, list(rows)] = taken

    def scrub(self) -> None:
        """Zero all values that are not finite."""
        for rows in (self.windows, self.states):
            rows.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
