"""Recipes for clusters among the examples."""

from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
CLUSTER_RECIPES = sorted(
    path
    for path in EXAMPLES.glob("*/*.yaml")
    if (path.parent / "model/config.json").is_file() and not (path.parent / "model/model.safetensors").exists()
)
"""Configurations beside a model's shape without its weights; an example that runs on a laptop ships weights."""
ON_H200 = ("deepseek-v3.2", "gemma4-26b", "kimi-k2", "minimax-m2", "qwen3-next-80b", "qwen3.5-35b")
"""Folders of recipes for H200; the others are for H100."""


def gpu_of(recipe: Path) -> str:
    """Return the GPU that a recipe is for."""
    return "h200-141" if recipe.parent.name in ON_H200 else "h100-80"
