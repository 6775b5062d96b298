"""Commands on the PATH of a launch script: stand-ins that record their calls, and real tools."""

import functools
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from fuligo.errors import ConfigError

_TOOLS = """
arch awk base64 basename bc cat cksum cmp column comm cut date df diff dirname du egrep env expand expr factor false fgrep find fmt fold
getconf getopt grep head id jq join locale ls md5sum mktemp nice nl nohup nproc numfmt od paste pathchk pr printenv printf pwd readlink
realpath rev sed seq sh sha1sum sha256sum shuf sort split stat stdbuf stty sum tac tail tee test timeout tr true tsort tty uname uniq wc
which whoami xargs yes
"""
TOOLS = _TOOLS.split()
"""Real tools that scripts may run, if this machine has them."""

_FILE_TOOLS = "chgrp chmod chown cp dd install link ln mkdir mkfifo mv rm rmdir touch truncate unlink"
FILE_TOOLS = _FILE_TOOLS.split()
"""File tools: real in the sandbox, where they change a private file system; stand-ins if there is no sandbox."""

_RECORDED = """
python python3 ray torchrun accelerate deepspeed fuligo uv conda srun sbatch scontrol mpirun ssh scp rsync sshpass pdsh sudo docker
nvidia-smi rocm-smi nvcc ibstat ip ifconfig hostname lsof fuser pidof pgrep pkill killall ps free sleep systemctl curl wget git pip pip3
hf huggingface-cli modelscope wandb aws gsutil tar unzip zip make cmake gcc g++ apt apt-get
"""
RECORDED = _RECORDED.split()
"""Stand-ins that `command -v` finds. A command that is neither real nor listed is recorded too, by bash's handler of unknown commands."""

_SYSTEM_PATH = "/usr/bin:/bin:/usr/local/bin:/run/current-system/sw/bin"
_WITH_NVLINK, _WITHOUT_NVLINK = "GPU0\tX\tNV18", "GPU0\tX\tPHB"
"""Replies of `nvidia-smi topo -m`, reduced to the word NV18 that scripts count (an H100 has 18 links)."""


@dataclass(frozen=True, slots=True)
class Commands:
    """Commands on a script's PATH."""

    tools: Mapping[str, str]
    """Resolved path of each real tool, by name; bash is one of them."""
    recorded: tuple[str, ...]
    libraries: tuple[str, ...]
    """Files that the tools load; none without a sandbox, where the script sees the whole machine."""

    def files(self, state: str, folder: str, has_nvlink: bool, *, trusted: bool) -> dict[str, str]:
        """Return the texts of the preamble and the recorder, by their paths in the directory `state`, which also holds the records.

        `folder` is the only directory on the script's PATH. If `trusted`, the script runs without a sandbox, so bash's built-in `kill` is
        disabled, and calls of it are recorded.
        """
        places = {"STATE": state, "BIN": folder, "TOPOLOGY": _WITH_NVLINK if has_nvlink else _WITHOUT_NVLINK}

        def filled(script: str) -> str:
            text = Path(__file__).with_name(script).read_text(encoding="utf-8")
            return re.sub("@([A-Z]+)@", lambda match: places[match[1]], text)

        kill = "enable -n kill\n" if trusted else ""
        return {f"{state}/preamble": kill + filled("preamble.sh"), f"{state}/unknown": filled("recorder.sh")}


def _libraries(tools: Iterable[str]) -> tuple[str, ...]:
    """Return the shared libraries that programs load, and the loader's cache."""
    listed = subprocess.run(["ldd", *tools], capture_output=True, text=True, check=False).stdout
    found = sorted(set(re.findall(r"(/\S+) \(0x", listed)))
    return tuple(path for path in (*found, "/etc/ld.so.cache") if Path(path).exists())


@functools.cache
def find_commands(*, sandboxed: bool) -> Commands:
    """Look up the real tools on this machine. Raises ConfigError if bash, or a tool that the stand-ins need, is not installed."""
    names = {"bash", *TOOLS, *FILE_TOOLS} if sandboxed else {"bash", *TOOLS}
    found = {name: shutil.which(name, path=_SYSTEM_PATH) or shutil.which(name) for name in sorted(names)}
    tools = {name: str(Path(place).resolve()) for name, place in found.items() if place is not None}
    if missing := [name for name in ("bash", "cat", "head", "tr") if name not in tools]:
        raise ConfigError(f"cannot run launch scripts: commands not found: {', '.join(missing)}; install them")
    recorded = [*RECORDED, *FILE_TOOLS] if sandboxed else [*RECORDED, *FILE_TOOLS, "kill"]
    libraries = _libraries(sorted(set(tools.values()))) if sandboxed else ()
    return Commands(MappingProxyType(tools), tuple(name for name in recorded if name not in tools), libraries)
