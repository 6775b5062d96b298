"""Models with a vision tower that fuligo trains and serves. Imports no torch."""

from collections.abc import Mapping
from typing import Any

from fuligo.formats.adapter_config import TOWER_MODULES
from fuligo.models.registry import VISION_TYPES

TOWER_PATTERN = f"^{TOWER_MODULES}"
"""Regular expression of the names of the towers' weights."""


def sees_images(config_json: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes a model of `VISION_TYPES`."""
    return config_json.get("model_type") in VISION_TYPES


def no_tower(directory: str, model_type: object) -> str:
    """Return the error message for images in the prompts of a model without a supported vision tower."""
    known = ", ".join(sorted(VISION_TYPES))
    return f"--multimodal-keys: {directory} is a {model_type} model; images in prompts need one of the type {known}"
