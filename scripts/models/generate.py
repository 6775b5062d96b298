"""Write the MODEL_ARGS of the recipes' models, generated from their config.json, to shell scripts next to this file.

python scripts/models/generate.py
"""

import json
from pathlib import Path

from fuligo.config.flag import option_name
from fuligo.models.megatron_flags import megatron_flags

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
RECIPES = {
    "glm4-9B": "glm4-9b",
    "glm4.5-355B-A32B": "glm4.5-355b",
    "glm4.7-30B-A3B": "glm4.7-flash",
    "glm5.2-744B-A40B": "glm5.2-744b",
    "qwen3-4B": "qwen3-4b",
    "mimo-7B-rl": "mimo-7b",
}
"""Recipe whose model a script describes, by name of the script."""


def script(recipe: str) -> str:
    """Return the text of one script."""
    config_json = json.loads((EXAMPLES / recipe / "model" / "config.json").read_text(encoding="utf-8"))
    lines = [line(name, value) for name, value in megatron_flags(config_json).items()]
    return "\n".join([f"# Made from examples/{recipe}/model/config.json by scripts/models/generate.py.", "MODEL_ARGS=(", *lines, ")", ""])


def line(name: str, value: object) -> str:
    """Return the line of one flag; a layer pattern is quoted, because brackets have a meaning to the shell."""
    if value is True:
        return f"   {option_name(name)}"
    return f'   {option_name(name)} "{value}"' if "[" in str(value) else f"   {option_name(name)} {value}"


if __name__ == "__main__":
    for name, recipe in RECIPES.items():
        (HERE / f"{name}.sh").write_text(script(recipe), encoding="utf-8")
