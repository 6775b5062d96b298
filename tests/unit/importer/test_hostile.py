"""Scripts that would do harm: bash runs them, and nothing outside of the sandbox changes."""

# ruff: noqa: E501 - hostile scripts in one line each

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fuligo
from fuligo.cli import main
from fuligo.errors import ConfigError
from fuligo.importer import run as run_module
from fuligo.importer import sandbox
from fuligo.importer.run import import_script
from fuligo.sandbox import processes
from fuligo.sandbox.system_calls import PR_SET_CHILD_SUBREAPER, prctl

pytestmark = [pytest.mark.usefixtures("sandbox"), pytest.mark.long]

SECONDS = 0.75


@dataclass
class Host:
    """Things of this machine that a script might reach."""

    folder: Path
    """Holds the script, a precious file, and a home."""
    bystander: subprocess.Popen[bytes]
    listener: socket.socket

    @property
    def variables(self) -> dict[str, str]:
        return {
            "PRECIOUS": str(self.folder / "precious"),
            "HOME": str(self.folder / "home"),
            "BYSTANDER": str(self.bystander.pid),
            "PORT": str(self.listener.getsockname()[1]),
        }

    def tree(self) -> dict[str, tuple[int, str]]:
        """Return mode and text of everything in the folder but the script."""
        return {
            str(path): (path.stat().st_mode, path.read_text() if path.is_file() else "")
            for path in sorted(self.folder.rglob("*"))
            if path.name != "run.sh"
        }


@pytest.fixture
def host(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """Set up what must not change, and check it afterwards. Its own temporary directory must end empty; others may import beside it."""
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    (tmp_path / "precious").write_text("keep me")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".bashrc").write_text("# mine")
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    earlier = running()
    bystander = subprocess.Popen(["sleep", "600"])
    host = Host(tmp_path, bystander, listener)
    before, device, known = host.tree(), Path("/dev/null").stat().st_mode, set(Path("/tmp").glob("hostile*"))
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # what a script leaves behind becomes a child of this process
    try:
        yield host
        assert host.tree() == before
        assert Path("/dev/null").stat().st_mode == device
        assert not list(temporary.iterdir())
        assert set(Path("/tmp").glob("hostile*")) <= known
        assert bystander.poll() is None
        with pytest.raises(BlockingIOError):
            listener.accept()
        assert running() == {bystander.pid} | earlier
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0)
        bystander.kill()
        bystander.wait()
        listener.close()


def running() -> set[int]:
    """Return the processes that this one started, directly or not; others may test at the same time."""
    return {process.pid for process in processes.descendants() if process.is_running}


def run(script: str, host: Host, seconds: float = SECONDS) -> str:
    """Run a hostile script to its end; what is said about it."""
    (host.folder / "run.sh").write_text(script)
    try:
        return "\n".join(import_script(host.folder / "run.sh", given=host.variables, seconds=seconds).notes)
    except ConfigError as error:
        return str(error)


HARMLESS = {
    "removes everything": "rm -rf --no-preserve-root / 2>/dev/null; rm -rf $PRECIOUS $HOME",
    "removes the folder": "rm -rf $(dirname $PRECIOUS)/*; echo gone > $PRECIOUS",
    "overwrites": "echo hostile > $PRECIOUS; cat </dev/null >| $PRECIOUS; truncate -s 0 $PRECIOUS; sed -i d $PRECIOUS; chmod 0 $PRECIOUS",
    "writes at home": "echo 'rm x' >> $HOME/.bashrc; mkdir -p $HOME/.ssh; echo key >> $HOME/.ssh/authorized_keys; touch ~/hostile",
    "writes to /tmp": "echo x > /tmp/hostile; mktemp /tmp/hostile.XXXXXX; mkdir /var/tmp/hostile; touch /hostile /usr/bin/hostile",
    "opens a connection": "echo GET > /dev/tcp/127.0.0.1/$PORT; exec 3<>/dev/tcp/127.0.0.1/$PORT; cat < /dev/udp/127.0.0.1/$PORT",
    "kills": "kill -9 $BYSTANDER; kill -9 1; kill -9 -1; pkill -9 sleep; killall sleep; kill -STOP 1",
    "writes to /proc": "echo x > /proc/sys/kernel/core_pattern; echo b > /proc/sysrq-trigger; echo 0 > /proc/sys/kernel/panic; echo 1 > /proc/1/mem",
    "changes devices": "chmod 000 /dev/null; rm -f /dev/null; mv /dev/zero /dev/null; echo x > /dev/sda; dd if=/dev/zero of=/dev/vda",
    "calls by path": "/usr/bin/python3 -c 'open(\"/tmp/hostile\", \"w\")'; /bin/rm -rf $HOME; /usr/bin/curl x; /sbin/reboot; /usr/bin/perl -e 1",
    "exec": "exec -a hostile /usr/bin/python3 hostile.py",
    "preloads": "export LD_PRELOAD=$PRECIOUS LD_LIBRARY_PATH=/tmp; rm -f $PRECIOUS; ls",
    "changes PATH": "export PATH=/usr/bin:/bin:/sbin:/usr/local/bin:$HOME; hash -r; python3 hostile.py; rm -f $PRECIOUS; unset PATH; rm $PRECIOUS",
    "changes the preamble": "unset BASH_ENV; trap - DEBUG; unset -f command_not_found_handle; rm -rf /run/import-script; rm $PRECIOUS",
    "uses awk": "awk 'BEGIN { system(\"rm -rf \" ENVIRON[\"HOME\"]); print 1 > ENVIRON[\"PRECIOUS\"]; \"id\" | getline }'",
    "uses find and xargs": "find / -name precious -delete 2>/dev/null; find $HOME -exec rm -f {} +; echo $PRECIOUS | xargs rm -f",
    "brings a program": "cp /usr/bin/env $HOME/hostile; chmod +x $HOME/hostile; $HOME/hostile rm $PRECIOUS; cd ~ && ./hostile touch $PRECIOUS",
    "asks for namespaces": "unshare -Ur id; mount -t tmpfs x /mnt; chroot /; umount /proc; mknod /tmp/hostile b 8 0; chown 1:1 $PRECIOUS",
    "leaves a job": "(trap '' HUP TERM; while :; do sleep 1; read -t 1 < <(:); done) & disown; nohup yes hostile >/dev/null &",
    "a link as a record": "ln -sf $PRECIOUS /run/import-script/records/1.1-1; ln -sf /etc/shadow /run/import-script/output; mkfifo /run/import-script/records/2",
    "a full disk": "for i in {1..30}; do head -c 7000000 /dev/zero > /tmp/hostile$i; done; head -c 7000000 /dev/zero > $HOME/hostile",
    "many files": "for i in {1..100000}; do : > /tmp/hostile$i || break; done",
    "many records": "while :; do python3 hostile.py || break; done",
}  # fmt: skip


@pytest.mark.parametrize("script", HARMLESS.values(), ids=HARMLESS)
def test_nothing_changes(script: str, host: Host):
    assert "run.sh" in run(script, host)


LIMITED = {
    "a fork bomb": (":(){ :|:& };:", ("processes", "ends with status", "signal", "time")),
    "forks that wait": ("while :; do read -t 100 < /dev/zero & done; wait", ("processes", "does not end")),
    "a memory bomb": ("x=aaaaaaaa; while :; do x=$x$x; done", ("ends with status", "memory", "signal", "does not end")),
    "many memory bombs": ("for i in {1..20}; do (head -c 100m /dev/zero | tail -n 1; x=$(yes | head -c 60m)) & done; wait", ("memory", "ends with status", "does not end")),
    "an endless loop": ("while :; do :; done", (f"the script does not end within {SECONDS} s",)),
    "an endless sleep": ("read < <(tail -f /dev/null)", (f"does not end within {SECONDS} s",)),
    "endless output": ("while :; do echo hostile; done", ("writes more than 8 MiB", "does not end")),
    "endless output of a tool": ("yes hostile; exit 7", ("ends with status 7", "writes more than 8 MiB", "does not end")),
    "endless recursion": ("f() { f; }; f", ("signal 11", "ends with status", "does not end")),
    "ignored signals": ("trap '' TERM INT HUP XCPU; while :; do :; done", (f"does not end within {SECONDS} s",)),
    "a stopped script": ("kill -STOP $$", (f"does not end within {SECONDS} s",)),
}  # fmt: skip


@pytest.mark.parametrize(("script", "ends"), LIMITED.values(), ids=LIMITED)
def test_limits_end_a_script(script: str, ends: tuple[str, ...], host: Host):
    said = run(script, host)
    assert any(end in said for end in ends), said


def test_a_script_that_continues_after_the_start_is_imported(host: Host):
    said = run("python3 train.py --a 1\nwhile :; do :; done", host, seconds=1.5)
    assert "line 2: the script does not end within 1.5 s, after it started the job" in said


def test_files_outside_of_its_folder_are_not_seen(host: Host):
    secret = host.folder.parent / f"{host.folder.name}-secret.sh"
    secret.write_text("echo secret")
    try:
        (host.folder / "innocent.sh").symlink_to(secret)
        assert "innocent.sh does not exist in the sandbox" in run("cd $(dirname $0); source ./innocent.sh", host)
        assert "shadow" in run("python3 train.py $(cat /etc/shadow)", host)
    finally:
        secret.unlink()
        (host.folder / "innocent.sh").unlink()


def test_secrets_of_the_caller_are_not_seen(tmp_path: Path):
    (tmp_path / "run.sh").write_text("python3 train.py --x $(env | grep -c SECRET) --key $WANDB_API_KEY --open $(ls /proc/self/fd | wc -l)")
    launch = import_script(tmp_path / "run.sh", environment={"WANDB_API_KEY": "secret", "SECRET": "1"}).launch
    assert launch.arguments == ("--x", "0", "--key", "--open", "4")  # the three standard streams, and the one that ls reads


def test_the_script_has_no_capabilities(tmp_path: Path):
    (tmp_path / "run.sh").write_text("python3 train.py $(grep -E 'Cap(Prm|Eff|Bnd|Amb)|NoNewPrivs' /proc/self/status | awk '{print $2}')")
    assert import_script(tmp_path / "run.sh").launch.arguments == (*["0000000000000000"] * 4, "1")


def test_no_program_of_the_script_is_executed(tmp_path: Path):
    """Not from any folder, not through the loader, not preloaded, not as a builtin of bash."""
    text = """
    for folder in /tmp /dev/shm "$(dirname "$0")" /run/import-script/records /root; do
      cp /usr/bin/true $folder/own; chmod +x $folder/own
      $folder/own && ran+=($folder)
      for loader in /lib*/ld-linux* ; do $loader $folder/own && ran+=(loader); done
    done
    cp "$(ls /lib/*/libc.so.6 /lib64/libc.so.6 | head -n 1)" /tmp/own.so
    LD_PRELOAD=/tmp/own.so cat /dev/null 2>&1 | grep -q 'cannot be preloaded' || ran+=(preload)
    enable -f /tmp/own.so own 2>&1 | grep -q 'cannot' || ran+=(enable)
    echo hostile >> /run/import-script/unknown && ran+=(stand-in)
    python3 train.py "${ran[@]}"
    """
    (tmp_path / "run.sh").write_text(text)
    assert import_script(tmp_path / "run.sh").launch.arguments == ()


def test_escape_sequences_are_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "run.sh").write_text("frob $'\\e]0;hostile\\a'; python3 train.py; echo $'\\e[31m'")
    main(["import-script", str(tmp_path / "run.sh")])
    printed = capsys.readouterr()
    assert "\x1b" not in printed.err + printed.out
    assert r"frob \x1b]0;hostile\x07" in printed.err


@pytest.mark.parametrize("folder", ["/", "/usr", "/proc", "/etc/ssl"])
def test_folders_of_the_system_are_not_shown(folder: str, tmp_path: Path):
    (tmp_path / "run.sh").write_text("python3 train.py")
    with pytest.raises(ConfigError, match="it is a system folder"):
        import_script(tmp_path / "run.sh", root=Path(folder))


def made(path: Path) -> Path:
    """Return a path whose folder exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv to become another user")
def test_a_user_without_privileges_has_the_sandbox_too():
    become = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    with tempfile.TemporaryDirectory(prefix="importer-user-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        package = Path(fuligo.__file__).parent
        for part in ("__init__.py", "importer/__init__.py", "importer/sandbox.py", "sandbox"):
            (shutil.copytree if (package / part).is_dir() else shutil.copy)(package / part, made(folder / "fuligo" / part))
        (folder / "run.sh").write_text("rm -rf $(dirname $0)/*; touch /tmp/hostile; kill -9 -1; /usr/bin/python3 train.py --id $(id -u)")
        task = run_module._Script(folder / "run.sh", (), {}, [(name, name)], has_nvlink=True, seconds=20)
        job = run_module._job(task, run_module._STATE, "/usr/bin", ()) | {"directory": "/"}
        for python in (sys.executable, "/usr/bin/python3"):
            if subprocess.run([*become, python, "-c", ""], check=False, capture_output=True).returncode == 0:
                break
        else:
            pytest.skip("another user can run no Python here")
        program = processes.command(sandbox.__name__)[-1].replace(str(package.parent), name)
        command = [*become, python, "-s", "-S", "-c", program]
        report = json.loads(subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, check=False).stdout)
        if "user namespaces" in report.get("unavailable", ""):
            pytest.skip(f"the kernel gives namespaces to root only: {report['unavailable']}")
        (record,) = [text for number, text in report["records"].items() if not number.endswith(".files")]
        assert "python3\0train.py\0--id\x000\0" in record
        assert sorted(path.name for path in folder.iterdir()) == ["fuligo", "run.sh"]


class TestWithoutSandbox:
    """Inside of a user namespace that permits no further ones."""

    @pytest.fixture
    def command(self, tmp_path: Path) -> list[str]:
        if shutil.which("unshare") is None:
            pytest.skip("needs unshare")
        (tmp_path / "run.sh").write_text(
            "pkill -9 python\nrm -rf $1\nkill -9 $2\nfrobnicate\nX=a/b\npython3 train.py --x $X --n $((1 + 1)) --lr 1e-6\n"
        )
        (tmp_path / "precious").write_text("keep me")
        forbid = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"'
        fuligo = [sys.executable, "-m", "fuligo", "import-script", "--no-slime"]
        return ["unshare", "-Ur", "sh", "-c", forbid, "sh", *fuligo, str(tmp_path / "run.sh"), str(tmp_path / "precious"), str(os.getpid())]

    def test_is_refused_and_says_what_would_run(self, command: list[str]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "cannot run run.sh in a sandbox: user namespaces are not permitted" in done.stderr
        assert "take effect on this machine" in done.stderr
        assert "--trust" in done.stderr

    def test_runs_with_stand_ins_if_trusted(self, command: list[str], tmp_path: Path):
        done = subprocess.run([*command, "--trust"], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout.splitlines()[1:]) == (0, ["optimizer:", "  lr: 1.0e-06"]) or "unknown flag --x" in done.stderr
        assert (tmp_path / "precious").read_text() == "keep me"

    def test_cannot_map_folders(self, command: list[str], tmp_path: Path):
        done = subprocess.run([*command, "--trust", "--map", f"/root/slime={tmp_path}"], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "--map needs a sandbox" in done.stderr


PARTS = r"""rm -rf $PRECIOUS|$(rm x)|`rm x`|eval|x=1|$x|${x:-|}|(|)|{|((|))|[[|]]|[|]|;|&|&&|<<EOF|EOF|<|>|>>|<(|if|then|fi|else|for x in|do|done|true
f()|f|case x in|esac|a=(|a+=(|${a[@]}|'|"|\|$((|1|/0|**|seq 5|ssh h|source|run.sh|exec|python3 train.py|2>&1|export|local|shift|return|set -e
printf %s|!|#|{1..3}|~|*|exit|a) b;;|a[0]=1|trap|wait|unset x|$?|$#|"$@"|:|> $PRECIOUS|cd $HOME|kill -9|$BYSTANDER|/dev/tcp/127.0.0.1/$PORT"""
WORDS = st.sampled_from([*PARTS.replace("\n", "|").split("|"), "|", "||", "\n"])


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(WORDS, max_size=25))
def test_any_jumble_ends_with_a_clear_error_or_a_launch(parts: list[str], host: Host):
    said = run(" ".join(parts), host)
    assert said == "" or "run.sh" in said


def test_a_report_is_bounded(tmp_path: Path):
    text = (
        "x=$(head -c 120000 /dev/zero | tr '\\0' x)\nfor i in {1..10}; do python3 other.py $x $x $x $x $x $x $x $x; done; python3 train.py"
    )
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(ConfigError, match="calls too many commands"):
        import_script(tmp_path / "run.sh", seconds=120)
