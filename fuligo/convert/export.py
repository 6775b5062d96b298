"""Export of a checkpoint's weights as a Hugging Face directory (--save-hf), and its upload (--push-to-hub).

Weights are in the model's own dtypes. A LoRA run exports its PEFT directory.
"""

import logging
import shutil
from pathlib import Path
from typing import Any

from fuligo.checkpoint.location import weights_of
from fuligo.errors import CheckpointError
from fuligo.formats.adapter_config import is_adapter
from fuligo.formats.checkpoint_files import UNFINISHED, is_distributed
from fuligo.formats.disk import sync, sync_tree, writing
from fuligo.formats.hugging_face import read_config_json
from fuligo.models.registry import experts_in

logger = logging.getLogger(__name__)


def export(checkpoint: Path, target: Path) -> None:
    """Export a checkpoint to `target`, which appears completely or not at all, and replaces an earlier export.

    Raises CheckpointError if the checkpoint is damaged, or `target` holds something other than an export; `target` is then unchanged.
    """
    if (problem := export_problem(target)) is not None:
        raise CheckpointError(f"{problem} (--save-hf)")
    new, old = (target.with_name(f"{UNFINISHED}{state}_{target.name}") for state in ("new", "old"))
    try:
        with writing(target):
            shutil.rmtree(new, ignore_errors=True)  # a crash may have left it
            from fuligo.convert.dist_to_hf import dist_to_hf, write_directory
            from fuligo.convert.published import PublishedWeights
            from fuligo.formats.hf_tensors import InOwnDtypes

            if is_adapter(weights_of(checkpoint)):
                shutil.copytree(weights_of(checkpoint), new)
                sync_tree(new)
            elif is_distributed(checkpoint):
                dist_to_hf(checkpoint, new)
            else:
                stored = InOwnDtypes(weights_of(checkpoint))
                weights = PublishedWeights(stored, experts_in(stored.directory))
                changed = _stating(read_config_json(stored.directory), str(stored.common).removeprefix("torch."))
                write_directory(weights, stored.directory, new, changed=changed)
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)
                target.rename(old)
            new.rename(target)
            sync(target.parent)
            shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _stating(config_json: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return the entries of config.json that state a dtype (of the whole model, its language model or its towers), changed to `dtype`."""
    parts = {key: part | {"dtype": dtype} for key, part in config_json.items() if isinstance(part, dict) and "dtype" in part}
    return {"dtype": dtype, **parts}


def export_problem(target: Path) -> str | None:
    """Return why an export may not replace `target`; None if it may."""
    is_ours = (target / "config.json").is_file() or is_adapter(target)
    if not target.exists() or (target.is_dir() and (is_ours or not any(target.iterdir()))):
        return None
    return f"cannot replace {target}: it is not a Hugging Face directory; use another directory"


def push_problem(name: str) -> str | None:
    """Return why models cannot be uploaded to `name`; None if the Hub accepts the user's token. Sends a request to the Hub."""
    from huggingface_hub import HfApi

    try:
        HfApi().whoami()
    except Exception as error:  # raised by the library or its network client
        reason = str(error).strip().partition("\n")[0].partition(". ")[0] or type(error).__name__
        return f"cannot upload to {name}: {reason}; log in with `hf auth login`, or export HF_TOKEN with a token that may write"
    return None


def push(directory: Path, name: str, *, title: str) -> None:
    """Upload a Hugging Face directory as one commit; a repository that does not exist is created, private.

    A failure is logged with the command that repeats the upload: the directory stays, and the run continues.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=directory, commit_message=title)
    except Exception as error:  # raised by the library or its network client
        logger.error("cannot upload %s to %s: %s; repeat it with: hf upload %s %s", directory, name, error, name, directory)
    else:
        logger.info("uploaded %s to %s", directory, name)
