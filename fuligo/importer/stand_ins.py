"""Commands on the PATH of a launch script: stand-ins that record how they are called, and tools that read, compute or print."""

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

_PREAMBLE = r"""
command_not_found_handle() { @STATE@/unknown "$@"; }
_import_script_trace() {
  export IMPORT_SCRIPT_PLACE=$1:$2 IMPORT_SCRIPT_UNSET=
  local _text=$BASH_COMMAND _name
  while [[ $_text = *'[@]}'* ]]; do
    _name=${_text%%'[@]}'*}; _name=${_name##*'{'}; _text=${_text#*'[@]}'}
    [[ $_name = *[!A-Za-z0-9_]* ]] || declare -p "$_name" &>/dev/null || IMPORT_SCRIPT_UNSET+=" $_name"
  done
  echo "$IMPORT_SCRIPT_PLACE" 1<>@STATE@/place
}
set -o functrace
trap '[[ ${FUNCNAME-} = command_not_found_handle ]] || _import_script_trace "${BASH_SOURCE-}" "$LINENO"' DEBUG
"""
"""Sourced by every bash (BASH_ENV): it tells the stand-ins which line calls them, and which of its arrays are not set."""

_RECORDER = r"""#!@BIN@/bash -p
name=${0##*/} unknown=
if [ "$0" = @STATE@/unknown ]; then name=$1 unknown=1; shift; fi
record=@STATE@/records/$EPOCHREALTIME-$$
captured=; [ -p /dev/stdout ] && captured=1
{
  printf '%s\0' "$IMPORT_SCRIPT_PLACE" "$captured" "$unknown" $# "$name" "$@"
  @BIN@/cat /proc/$$/environ
} >"$record"
for word; do
  file=$word; case $word in --*=*) file=${word#*=} ;; esac
  if [ -f "$file" ] && [ "${file##*.}" != py ]; then
    printf '%s\0' "$file"; @BIN@/head -c 200000 "$file" | @BIN@/tr -d '\0'; printf '\0'
  fi
done >"$record.files"
case "$name,$*" in
  nvidia-smi,topo*) printf '%s\n' '@TOPOLOGY@' ;;
  nvidia-smi,-L* | nvidia-smi,--list-gpus* | nvidia-smi,*--query-gpu=*) for i in 0 1 2 3 4 5 6 7; do echo "$i"; done ;;
  hostname,*-[iI]*) echo 127.0.0.1 ;;
  hostname,*) echo localhost ;;
  "ray,job submit"*" -- "*)
    export IMPORT_SCRIPT_SUBMISSION=${record##*/}
    while [ "$1" != -- ]; do shift; done
    shift; exec "$@" ;;
  sudo,?*)
    while [[ ${1-} = -* || ${1-} = *=* ]]; do [ "$1" = -u ] && shift; shift; done
    [ $# = 0 ] || exec "$@" ;;
  pgrep,* | pidof,* | lsof,* | fuser,*) exit 1 ;;
esac
exit 0
"""
_SYSTEM_PATH = "/usr/bin:/bin:/usr/local/bin:/run/current-system/sw/bin"
_WITH_NVLINK, _WITHOUT_NVLINK = "GPU0\tX\tNV18", "GPU0\tX\tPHB"
"""Replies of `nvidia-smi topo -m`, reduced to the word NV18 that scripts count (an H100 has 18 links)."""


@dataclass(frozen=True, slots=True)
class Commands:
    """Commands on a script's PATH."""

    tools: Mapping[str, str]
    """Name -> resolved path of a real tool, bash among them."""
    recorded: tuple[str, ...]
    """Names of the stand-ins."""
    libraries: tuple[str, ...]
    """Files that the tools load; none without a sandbox, where the script sees the whole machine."""

    def files(self, state: str, folder: str, has_nvlink: bool, *, trusted: bool) -> dict[str, str]:
        """Return the texts of the preamble and the recorder by path; `folder` is the script's PATH."""
        places = {"STATE": state, "BIN": folder, "TOPOLOGY": _WITH_NVLINK if has_nvlink else _WITHOUT_NVLINK}

        def filled(text: str) -> str:
            return re.sub("@([A-Z]+)@", lambda match: places[match[1]], text)

        kill = "enable -n kill\n" if trusted else ""
        return {f"{state}/preamble": kill + filled(_PREAMBLE), f"{state}/unknown": filled(_RECORDER)}


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
    missing = [name for name in ("bash", "cat", "head", "tr") if name not in tools]
    if missing:
        raise ConfigError(f"cannot run launch scripts: {', '.join(missing)} is not installed")
    recorded = [*RECORDED, *FILE_TOOLS] if sandboxed else [*RECORDED, *FILE_TOOLS, "kill"]
    libraries = _libraries(sorted(set(tools.values()))) if sandboxed else ()
    return Commands(MappingProxyType(tools), tuple(name for name in recorded if name not in tools), libraries)
