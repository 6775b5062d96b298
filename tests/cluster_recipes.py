"""Recipes for clusters among the examples."""

from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
CLUSTER_RECIPES = sorted(
    path
    for path in EXAMPLES.glob("*/*.yaml")
    if (path.parent / "model/config.json").is_file() and not (path.parent / "model/model.safetensors").exists()
)
"""Configurations beside a model's shape without its weights; an example that runs on a laptop ships weights."""
