"""Resources that a node offers to Ray."""

import pytest

from fuligo.cluster.launch import slots_here
from fuligo.errors import ConfigError


@pytest.mark.parametrize("environment", [{}, {"CUDA_VISIBLE_DEVICES": "4,5"}, {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}])
def test_slots_here_are_those_of_the_host_file_if_they_are_visible(environment: dict[str, str]) -> None:
    assert slots_here(2, "cuda", environment)[1] == 2


@pytest.mark.parametrize(("visible", "num_visible"), [("4,5", 2), ("", 0)])
def test_slots_here_refuses_more_gpus_than_are_visible(visible: str, num_visible: int) -> None:
    with pytest.raises(ConfigError, match=rf"cannot offer 8 GPUs .* CUDA_VISIBLE_DEVICES={visible} leaves {num_visible}; write slots="):
        slots_here(8, "auto", {"CUDA_VISIBLE_DEVICES": visible})


def test_slots_here_are_processes_on_a_cpu() -> None:
    assert slots_here(3, "cpu", {"CUDA_VISIBLE_DEVICES": ""}) == (3, 0)
