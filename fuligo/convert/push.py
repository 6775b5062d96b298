"""Upload of exported models to the Hugging Face Hub (--push-to-hub)."""

import logging
from pathlib import Path

logger = logging.getLogger(__name__)


def push_problem(name: str) -> str | None:
    """Return why models cannot be uploaded to `name`; None if the Hub knows the user. Asks the Hub."""
    from huggingface_hub import HfApi

    try:
        HfApi().whoami()
    except Exception as error:  # of the library or its network client
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
    except Exception as error:  # of the library or its network client
        logger.error("cannot upload %s to %s: %s; repeat it with: hf upload %s %s", directory, name, error, name, directory)
    else:
        logger.info("uploaded %s to %s", directory, name)
