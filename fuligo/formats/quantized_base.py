"""Quantized base weights of a LoRA run: their storage format, and its record next to the adapter."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self, get_args

from fuligo.errors import CheckpointError

BasePrecision = Literal["nf4", "8bit"]
BITS: dict[BasePrecision, int] = {"nf4": 4, "8bit": 8}
BLOCK_SIZE = 64
"""Number of elements that share one float32 scale."""
BASE_PRECISION = "base_precision.json"
"""Name of the JSON file with the fields of `QuantizedBase`, next to `adapter_config.json`; PEFT ignores it."""


@dataclass(slots=True, frozen=True)
class QuantizedBase:
    """Storage format of the matrices of a base model's linear layers and experts."""

    precision: BasePrecision
    dtype: str
    """Data type to which dequantized values are rounded, and in which they are sent to engines, such as `bfloat16`."""
    block_size: int = BLOCK_SIZE

    def write(self, adapter: Path) -> None:
        """Write the record to an adapter directory. Raises CheckpointError if it cannot be written."""
        try:
            (adapter / BASE_PRECISION).write_text(json.dumps(asdict(self), indent=2))
        except OSError as error:
            raise CheckpointError(f"cannot write {adapter / BASE_PRECISION}: {error}; make the directory writable") from error

    @classmethod
    def read(cls, adapter: Path) -> Self | None:
        """Read the record in an adapter directory; None if there is none. Raises CheckpointError if it is damaged or not supported."""
        file = adapter / BASE_PRECISION
        if not file.exists():
            return None
        try:
            fields = json.loads(file.read_text())
            found = cls(fields["precision"], str(fields["dtype"]), int(fields["block_size"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"cannot read {file}: {error!r}; copy the adapter again") from error
        if found.precision not in get_args(BasePrecision) or found.block_size != BLOCK_SIZE or found.dtype not in _DTYPES:
            raise CheckpointError(
                f"cannot read {file}: this version of fuligo does not support {found}; use the version that wrote the adapter"
            )
        return found


_DTYPES = ("bfloat16", "float16", "float32")


def other_storage(trained_on: QuantizedBase | None, own: QuantizedBase | None) -> str:
    """Return the predicate of an error about an adapter whose base was stored differently: "was trained on ..., but this run's is ..."."""
    theirs, ours = ("not quantized" if base is None else f"in {base.precision}, rounded to {base.dtype}" for base in (trained_on, own))
    return f"was trained on a base {'that was ' if trained_on is None else ''}{theirs}, but this run's is {ours}"


def stored_bytes(num_elements: int, precision: BasePrecision) -> int:
    """Return the size of a quantized matrix with its scales, in bytes."""
    return -(-num_elements * BITS[precision] // 8) + 4 * -(-num_elements // BLOCK_SIZE)
