"""MTP layer of Qwen3-Next and Qwen3.5, which transformers 5.12.1 does not have."""

from pathlib import Path

from torch import Tensor

from fuligo.formats.hf_tensors import HuggingFaceTensors
from fuligo.formats.hugging_face import MTP_PREFIX, read_config_json
from fuligo.models.registry import has_mtp_module


def stored_mtp(*directories: Path) -> dict[str, Tensor]:
    """Return the MTP layer's tensors of the first of these directories that has them, as they are stored; empty if none does.

    Raises CheckpointError if a file is missing or damaged.
    """
    for directory in directories:
        if not has_mtp_module(read_config_json(directory)):
            continue
        files = HuggingFaceTensors(directory)
        if names := [name for name in files.shapes if name.startswith(MTP_PREFIX)]:
            return {name: files.read(name).clone() for name in names}  # not the files' memory map
    return {}
