"""Nemotron-H: Mamba-2 layers among attention and MLPs. Not supported."""

WHY_NOT = (
    "transformers 5.12.1 passes the state of its Mamba layers from one packed sample to the next, and the Megatron trainer has no such "
    "layers: Megatron-Core 0.16.1 computes them only with the CUDA kernels of mamba-ssm"
)
