"""Ray manages some of a machine's GPUs, under the machine's own numbers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuligo.cluster.reservation import in_physical_order

INTERPRETER = """#!/bin/sh
echo sees $CUDA_VISIBLE_DEVICES, takes "$@"
sleep 60
"""
START_AN_ENGINE_ON_THE_SECOND_GPU = """
import asyncio, sys
from pathlib import Path
import ray
from fuligo.cluster.cluster import Node, ordinals
from fuligo.config.secret import Environment
from fuligo.cluster.reservation import reserve, start_agent
from fuligo.engines.sglang.server import ServerPorts, ServerSettings

async def start(python, log):
    reservation = await reserve([2], "cuda")
    agent = start_agent(reservation, reservation.bundles[0], "cuda", Environment())
    node = Node(reservation.bundles[0], agent, await agent.gpus.remote())
    print("has", *node.gpus)
    place = {"gpu_ids": ordinals(node, [1]), "python": python}
    ports = ServerPorts(1, 2, 3)
    await agent.start.remote(ServerSettings("engine 0", "model", 1, 1, {}, "regular", "cuda", "127.0.0.1", ports, log, **place))
    while not (log.exists() and "takes" in log.read_text()):
        await asyncio.sleep(0.1)
    await agent.stop.remote("engine 0")

ray.init("local", num_cpus=1, num_gpus=2, include_dashboard=False, log_to_driver=False)
asyncio.run(asyncio.wait_for(start(sys.argv[1], Path(sys.argv[2])), 120))
"""


@pytest.mark.parametrize(("given", "ordered"), [([5, 10, 7], ("5", "7", "10")), (["GPU-b", "GPU-a"], ("GPU-b", "GPU-a")), ([], ())])
def test_order(given: list[int | str], ordered: tuple[str, ...]) -> None:
    assert in_physical_order(given) == ordered


def test_an_engine_counts_its_gpus_among_those_that_it_sees(tmp_path: Path) -> None:
    interpreter, log = tmp_path / "python", tmp_path / "engine.txt"
    interpreter.write_text(INTERPRETER)
    interpreter.chmod(0o755)
    command = [sys.executable, "-c", START_AN_ENGINE_ON_THE_SECOND_GPU, str(interpreter), str(log)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "7,5", "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "has 5 7\n" in done.stdout
    assert "sees 5,7, takes" in log.read_text()
    assert "--base-gpu-id 1" in log.read_text(), "the second of them has the number 7 on the machine"
