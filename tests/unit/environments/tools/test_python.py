"""The Python tool on programs that mean no harm."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path

import pytest

import fuligo
from fuligo.environments.tools.python import Interpreters, PythonSession, PythonSettings, PythonTool, check_sandbox, shared_interpreters
from fuligo.errors import ConfigError
from fuligo.sandbox import interpreter, processes
from tests.unit.environments.tools.conftest import SETTINGS, SHORT

pytestmark = pytest.mark.usefixtures("sandbox")


@pytest.fixture
async def session() -> AsyncIterator[PythonSession]:
    session = PythonSession(SETTINGS)
    yield session
    session.close()


class TestOutput:
    @pytest.mark.parametrize(
        ("code", "output"),
        [
            ("print(1 + 1)", "2\n"),
            ("1 + 1", "2\n"),
            ("x = 2\nx * 21", "42\n"),
            ("'ä' + chr(0x1F600)", "'ä\N{GRINNING FACE}'\n"),
            ("print('\\ud800')", "\\ud800\n"),
            ("None", ""),
            ("", ""),
            ("import sys; print('a'); print('b', file=sys.stderr); print('c')", "a\nb\nc\n"),
            ("print('a', end='')", "a"),
            ("raise SystemExit", ""),
            ("import sys; print(1); sys.exit('wrong'); print(2)", "1\nSystemExit: wrong\n"),
            ("__name__", "'__main__'\n"),
            ("input()", None),
            ("class A:\n  def __repr__(self): return 1 / 0\nA()", None),
        ],
    )
    async def test_is_that_of_a_notebook_cell(self, session: PythonSession, code: str, output: str | None):
        result = await session.run(code)
        assert result.end == "ok"
        assert result.output == output if output is not None else "Error" in result.output

    async def test_of_an_exception_names_the_line_of_the_program_alone(self, session: PythonSession):
        result = await session.run("def f():\n    return 1 / 0\n\nf()")
        expected = [
            "Traceback (most recent call last):",
            '  File "<program>", line 4, in <module>',
            "    f()",
            '  File "<program>", line 2, in f',
            "    return 1 / 0",
            "           ~~^~~",
            "ZeroDivisionError: division by zero",
        ]
        assert [line for line in result.output.splitlines() if not set(line) <= {" ", "^", "~"} or "~" in line] == expected

    async def test_of_a_syntax_error_names_the_line(self, session: PythonSession):
        assert (await session.run("x = 1\nif")).output.splitlines() == [
            '  File "<program>", line 2',
            "    if",
            "      ^",
            "SyntaxError: invalid syntax",
        ]

    async def test_of_children_that_end_is_kept(self, session: PythonSession):
        code = "import os\nif os.fork() == 0:\n    print('child', flush=True)\n    os._exit(0)\nos.wait()\nprint('parent')"
        assert (await session.run(code)).output == "child\nparent\n"

    async def test_is_the_same_again(self):
        code = "import random; print(random.random(), hash('a'), {'a', 'b', 'c', 'd'})"
        outputs = set()
        for _ in range(3):
            session = PythonSession(SETTINGS)
            outputs.add((await session.run(code)).output)
            session.close()
        own = Interpreters(SETTINGS)  # a process that was started anew
        own.start()
        shared_interpreters(SETTINGS).close()
        session = PythonSession(SETTINGS)
        outputs.add((await session.run(code)).output)
        session.close()
        own.close()
        assert len(outputs) == 1


class TestSession:
    async def test_keeps_variables_files_and_imports(self, session: PythonSession):
        await session.run("import math\nx = 2\nopen('note', 'w').write('kept')")
        result = await session.run("print(math.sqrt(x * 2), open('note').read())")
        assert (result.output, result.keeps_variables) == ("2.0 kept\n", True)

    async def test_continues_after_an_exception_and_restarts_after_a_limit(self):
        session = PythonSession(SHORT)
        try:
            await session.run("x = 1")
            assert (await session.run("1 / 0")).keeps_variables
            assert (await session.run("x")).output == "1\n"
            assert not (await session.run("while True: pass")).keeps_variables
            assert "NameError" in (await session.run("x")).output
        finally:
            session.close()

    async def test_continues_after_the_process_that_serves_sessions_died(self, session: PythonSession):
        await session.run("x = 1")
        process = shared_interpreters(SETTINGS)._process
        assert process is not None
        process.kill()
        process.wait()
        assert (await session.run("x")).output == "1\n"
        other = PythonSession(SETTINGS)
        assert (await other.run("1")).output == "1\n"
        other.close()

    async def test_ends_if_its_call_is_cancelled(self, session: PythonSession):
        await session.run("x = 1")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await session.run("while True: pass")
        assert "NameError" in (await session.run("x")).output

    @pytest.mark.long
    @pytest.mark.parametrize("spoil", ["os.close(3)", "os.write(4, b'.')\nwhile True: time.sleep(1)"], ids=["closed", "never read"])
    async def test_continues_after_a_program_damaged_its_pipes(self, spoil: str):
        session = PythonSession(SHORT)
        try:
            await session.run(f"import os, time\n{spoil}")
            result = await session.run("#" * 200_000)  # more than a pipe takes
            assert (result.end in {"exit", "time"}, result.keeps_variables) == (True, False)
            assert (await session.run("1")).output == "1\n"
        finally:
            session.close()

    async def test_many_at_once(self):
        async def square(number: int) -> str:
            session = PythonSession(SETTINGS)
            try:
                return (await session.run(f"{number} ** 2")).output
            finally:
                session.close()

        assert await asyncio.gather(*(square(number) for number in range(40))) == [f"{number**2}\n" for number in range(40)]


class TestTool:
    async def test_starts_each_program_afresh_unless_asked(self):
        for keeps, second in ((False, "NameError: name 'x' is not defined"), (True, "1")):
            tool = PythonTool(SETTINGS, keeps_variables=keeps)
            assert await tool.python("x = 1") == "(no output)"
            assert (await tool.python("x")).endswith(second)
            tool.close()

    @pytest.mark.parametrize(
        ("code", "text"),
        [
            ("print('a')\nwhile True: pass", "a\nThe program was stopped: it "),
            ("print('x' * 10000)", "The program was stopped: it printed more than 4,096 bytes."),
            ("import os; os._exit(3)", "The program ended with exit status 3."),
            ("import os; os.kill(os.getpid(), 11)", "The program was ended by SIGSEGV."),
            ("import os; os.kill(os.getpid(), 40)", "The program was ended by signal 40."),
        ],
    )
    async def test_names_the_limit(self, code: str, text: str):
        tool = PythonTool(SHORT)
        assert text in await tool.python(code)
        tool.close()


class TestModules:
    async def test_are_imported_before_the_first_call(self):
        session = PythonSession(SETTINGS.model_copy(update={"modules": ("numpy",)}))
        code = (
            "import sys; loaded = 'numpy' in sys.modules; import numpy; print(loaded, numpy.linalg.det(numpy.eye(3)), numpy.fft.fft([1.0]))"
        )
        assert (await session.run(code)).output == "True 1.0 [1.+0.j]\n"
        session.close()

    async def test_of_fuligos_environment_are_not_seen_unless_named(self, session: PythonSession):
        assert "ModuleNotFoundError" in (await session.run("import numpy")).output
        assert "ModuleNotFoundError" in (await session.run("import fuligo.types")).output

    def test_that_do_not_exist_are_refused(self):
        with pytest.raises(ConfigError, match=r"import numpyy: ModuleNotFoundError.*install it"):
            check_sandbox(PythonSettings(modules=("numpyy",)))


def test_check_passes_inside_of_an_event_loop():
    async def check() -> None:
        check_sandbox(SETTINGS)

    asyncio.run(check())


REFUSALS = {
    "no user namespaces": ("echo 0 > /proc/sys/user/max_user_namespaces", "user namespaces are not permitted"),
    "a masked /proc, as in Docker": ("mount -t tmpfs none /proc/scsi || mount -t tmpfs none /proc/sys", "the kernel refuses a mount"),
}


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
@pytest.mark.parametrize(("prepare", "reason"), REFUSALS.values(), ids=REFUSALS)
def test_machine_without_a_sandbox_is_refused_with_the_reason_and_the_fix(prepare: str, reason: str):
    check = "from fuligo.environments.tools.python import *; check_sandbox(PythonSettings())"
    command = ["unshare", "-Urmp", "--fork", "--mount-proc", "sh", "-c", prepare + '; exec "$@"', "sh", sys.executable, "-c", check]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "ConfigError: cannot run Python in a sandbox: " + reason in done.stderr
    assert "seccomp=unconfined" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv to become another user")
def test_a_user_without_privileges_has_the_sandbox_too():
    become = ["setpriv", "--reuid=1234", "--regid=1234", "--clear-groups"]
    for python in (sys.executable, "/usr/bin/python3"):
        if (
            subprocess.run(
                [*become, python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"], check=False, capture_output=True
            ).returncode
            == 0
        ):
            break
    else:
        pytest.skip("another user can run no Python here")
    package = Path(fuligo.__file__).parent
    with tempfile.TemporaryDirectory(prefix="fuligo-user-") as name:
        Path(name).chmod(0o755)
        for part in ("__init__.py", "sandbox"):
            target = Path(name, "fuligo", part)
            target.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if (package / part).is_dir() else shutil.copy)(package / part, target)
        program = processes.command(interpreter.__name__)[-1].replace(str(package.parent), name)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process = subprocess.Popen([*become, python, "-s", "-S", "-c", program], stdin=theirs)
        theirs.close()
        folders = [(os.path.realpath(path), path) for path in ("/lib", "/lib64", "/usr/lib") if Path(path).is_dir()]
        limits = interpreter.Limits(10, 10, 128 << 20, 16 << 20, 4096, 8, 1, tuple(folders), (), ())
        ours.send(json.dumps(asdict(limits)).encode())
        assert json.loads(ours.recv(1000)) == {}
        session, other = socket.socketpair()
        with session, other, ours:
            socket.send_fds(ours, [b"."], [other.fileno()])
            other.close()
            code = "import os; print(os.getuid(), open('/proc/self/status').read().count('0000000000000000'))\nwhile True: os.fork()"
            session.sendall(json.dumps({"code": code}).encode() + b"\n")
            answers = session.makefile()
            report = json.loads(answers.readline())
            if "started" in report:
                report = json.loads(answers.readline())
        process.wait()
    if "user namespaces" in report.get("unavailable", ""):
        pytest.skip(f"the kernel gives namespaces to root only: {report['unavailable']}")
    assert report["output"].startswith("1234 ")
    assert "BlockingIOError" in report["output"] or report["ended"] == "processes"
