"""Environment that misbehaves as its row says. The process of environments imports this module anew in each test, and so without torch."""

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import tqdm

from fuligo.environments import AssistantTurn, Environment, EnvironmentSettings, Matches, Row, Start, Step

match os.environ.get("WHEN_IMPORTED"):
    case "start a thread":
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    case "hang":
        print("hangs", os.getpid(), subprocess.Popen(["sleep", "3600"]).pid, flush=True)
        time.sleep(3600)
    case "show progress":
        for _ in tqdm.tqdm(range(2), mininterval=0.0):
            pass
    case "want a secret":
        os.environ["MY_API_KEY"]


class Misbehaving(Environment):
    """Misbehaves in the first step, unless the prompt says where. The second step tells the process, and ends the episode."""

    resumable = True
    last_pid = 0

    def __init__(self, row: Row, settings: EnvironmentSettings) -> None:
        super().__init__(row, settings)
        if row.prompt == "crashes in the constructor":
            crash()

    async def reset(self) -> Start:
        if self.row.prompt == "blocks in reset":
            time.sleep(3600)  # noqa: ASYNC251 - it is to block
        return Start([{"role": "user", "content": "q"}])

    async def step(self, turn: AssistantTurn) -> Step:
        if turn.last:
            return Step(reward=0.5, done=True, metrics={"pid": os.getpid(), "leader": float(os.getsid(0) == os.getpid())})
        content = misbehave(str(self.row.prompt))
        if self.row.prompt == "leaves a call in a thread":
            asyncio.get_running_loop().run_in_executor(None, time.sleep, 3600)
        if self.row.prompt == "leaves a child of a thread":
            content = await asyncio.to_thread(child)
        if self.row.prompt == "leaves a task":
            self.task = asyncio.create_task(asyncio.sleep(3600))
        return Step([{"role": "user", "content": content}])

    def state(self) -> Any:
        return object() if self.row.prompt == "has no JSON state" else {"pid": os.getpid()}

    async def restore(self, state: Any) -> None:
        pass

    async def close(self) -> None:
        if self.row.prompt == "blocks in close":
            time.sleep(3600)  # noqa: ASYNC251 - it is to block
        if self.row.prompt == "exits in close":
            os._exit(4)


class Shared(Misbehaving):
    """Episodes that must live in the process of the run."""

    isolated = False


class Joining(Misbehaving):
    """Player of a match whose class forgot to say so."""

    async def reset(self) -> Start:
        Matches[list[int]]().join(self.row.index, list)
        return Start([])


def crash() -> None:
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    ctypes.string_at(0)


def child(*, start_new_session: bool = False) -> str:
    """Start a process and return its id."""
    return str(subprocess.Popen(["sleep", "3600"], start_new_session=start_new_session).pid)


def daemon() -> str:
    """Start a process in a session of its own that is not a child, and return its id."""
    said = subprocess.run(["setsid", "sh", "-c", "sleep 3600 >/dev/null 2>&1 & echo $!"], capture_output=True, check=True)
    return said.stdout.decode().strip()


def misbehave(how: str) -> str:
    """Do it, and return what there is to say."""
    match how:
        case "blocks":
            time.sleep(3600)
        case "computes in C":
            sum(range(10**15))
        case "waits for a lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        case "ignores signals":
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            time.sleep(3600)
        case "exits":
            os._exit(7)
        case "crashes":
            crash()
        case "kills itself":
            os.kill(os.getpid(), signal.SIGKILL)
        case "closes descriptors":
            os.closerange(0, 4096)
        case "closes descriptors and blocks":
            os.closerange(0, 4096)
            time.sleep(3600)
        case "writes garbage" | "announces too much":
            garbage = b"\x05\0\0\0\0\0\0\0hello" if how == "writes garbage" else b"\xff" * 8
            for descriptor in range(3, 64):
                try:
                    with socket.socket(fileno=os.dup(descriptor)) as connection:
                        connection.sendall(garbage)
                except OSError:
                    continue
        case "eats memory":
            len(bytearray(1 << 34))
        case "says much":
            return "x" * (64 << 20)
        case "prints":
            print("printed by the environment", flush=True)
            print("x" * (1 << 20))
            for number in range(100_000):
                print(number)
            sys.stderr.write("\n")
        case "leaves a child":
            return child()
        case "leaves a child in a session":
            return child(start_new_session=True)
        case "leaves a daemon":
            return daemon()
        case "leaves its descriptors to a child and exits":
            if os.fork() == 0:
                os.setsid()
                time.sleep(3600)
            time.sleep(0.1)  # the child has a session of its own
            os._exit(7)
        case "leaves a thread":
            threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
        case "shows its variables":
            return repr(dict(os.environ))
        case "wants a secret":
            return os.environ["MY_API_KEY"]
    return ""
