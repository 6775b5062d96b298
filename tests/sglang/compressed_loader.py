"""Load compressed checkpoints with transformers and the package compressed-tensors, in SGLang's interpreter, which has the package.

    python compressed_loader.py ORIGINAL SAVED [SAVED ...]

Prints a line of JSON for each SAVED: the names of tensors that did not fit, and the relative difference of its logits from ORIGINAL's.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM


@torch.no_grad()
def main(original: str, directories: list[str]) -> None:
    ids = torch.arange(20)[None]
    expected = AutoModelForCausalLM.from_pretrained(original)(ids).logits.float()
    for directory in directories:
        model, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
        found = model(ids).logits.float()
        keys = [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]
        print(json.dumps([keys, float((found - expected).norm() / expected.norm())]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
