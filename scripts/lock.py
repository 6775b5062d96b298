"""Write requirements/hashed/: the pins of requirements/ with the hashes of all files that the package index offers for them.

Run it with `make lock` after a change in requirements/. torch for CPUs is left out, because it comes from another index,
download.pytorch.org, whose builds, and so their hashes, differ from PyPI's, which are for NVIDIA GPUs.
"""

import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REQUIREMENTS = Path(__file__).parents[1] / "requirements"
HASHED = REQUIREMENTS / "hashed"
UNHASHED = {"torch", "fuligo"}
COMPLETE = ("ray.txt", "gpu.txt", "megatron-gpu.txt", "sglang-cpu.txt", "sglang-gpu.txt", "verifiers.txt")
"""Files of requirements/ that list every package they install."""


def pins(name: str) -> dict[str, str]:
    """Return the lines of a file in requirements/ by package."""
    lines = (line.partition("#")[0].strip() for line in (REQUIREMENTS / name).read_text().splitlines())
    return {canonicalize_name(line.partition("==")[0]): line for line in lines if line}


def closure(package: str) -> set[str]:
    """Return the installed packages that a package needs without extras, itself included."""
    found: set[str] = set()
    pending = [package]
    while pending:
        name = canonicalize_name(pending.pop())
        if name in found:
            continue
        found.add(name)
        needed = [Requirement(text) for text in metadata.distribution(name).requires or []]
        pending += [requirement.name for requirement in needed if requirement.marker is None or requirement.marker.evaluate({"extra": ""})]
    return found


def write(name: str, lines: list[str]) -> None:
    """Write one file with hashes, using uv."""
    (HASHED / name).unlink(missing_ok=True)  # otherwise uv would keep the hashes of the versions in the existing file
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as source:
        source.write("\n".join(lines))
        source.flush()
        options = ["--no-deps", "--generate-hashes", "--no-header", "--no-annotate", "--quiet", "--python-version", "3.11"]
        subprocess.run([sys.executable, "-m", "uv", "pip", "compile", *options, source.name, "--output-file", HASHED / name], check=True)


def main() -> None:
    constraints = pins("constraints.txt")
    base = closure("fuligo") - UNHASHED
    if unpinned := base - constraints.keys():
        sys.exit(f"cannot write requirements/hashed: constraints.txt does not pin {', '.join(sorted(unpinned))}; add them")
    HASHED.mkdir(exist_ok=True)
    write("base.txt", [line for name, line in constraints.items() if name in base])
    write("dev.txt", [line for name, line in constraints.items() if name not in base | UNHASHED])
    for name in COMPLETE:
        write(name, list(pins(name).values()))


if __name__ == "__main__":
    main()
