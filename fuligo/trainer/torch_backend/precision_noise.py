"""Measurement of the policy's precision noise: its log-probabilities in bfloat16 against those of the same weights in float32.

"The same weights" are those rounded to bfloat16, with which the trainer's passes and the engines compute. Both passes gather and cast one
layer at a time themselves, because FSDP's hooks always cast to bfloat16 and would leave the other ranks waiting if one failed.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map_only

from fuligo.trainer.batch import PackedTokens, pack_tokens
from fuligo.trainer.precision_noise import Unmeasured, mean_difference
from fuligo.trainer.ranks.world import World
from fuligo.trainer.torch_backend.model import Policy
from fuligo.trainer.torch_backend.weights import full_tensor
from fuligo.types import TrainSample


@torch.no_grad()
def precision_noise(policy: Policy, samples: Sequence[TrainSample], world: World, *, per_token: bool) -> float | Unmeasured | None:
    """Return the mean absolute difference in nats over the trained tokens of the samples; None on ranks other than 0. A collective.

    Tokens are weighted as in the loss (`per_token`: `LossSettings.per_token`), like the difference between engine and trainer. All ranks
    compute the same samples. Weights, hooks and random state are unchanged afterwards, and no device memory stays allocated. If a pass
    fails on one rank, for example for lack of memory, it ends on all ranks, and the result is `Unmeasured`.
    """
    outcomes = world.gather(_measure(policy, samples, world, per_token=per_token))
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    if outcomes is None:
        return None
    own_failures = [outcome for outcome in outcomes if isinstance(outcome, Unmeasured) and outcome.reason]
    return own_failures[0] if own_failures else outcomes[0]


def _measure(policy: Policy, samples: Sequence[TrainSample], world: World, *, per_token: bool) -> float | Unmeasured:
    """Measure on this rank. `Unmeasured` has no reason if only another rank failed."""
    policy.release_gathered()
    try:
        # Compiled layers would be compiled again for float32, which takes longer than these passes.
        eager = torch.compiler.set_stance("force_eager") if policy.is_compiled else nullcontext()
        with torch.random.fork_rng([world.device] if world.device.type == "cuda" else []), eager:
            tokens = pack_tokens(samples, world.device)
            half, full = (_logprobs(policy, tokens, dtype, world).cpu().numpy() for dtype in (torch.bfloat16, torch.float32))
            noise = mean_difference(samples, half, full, per_token=per_token)
        failure = None if np.isfinite(noise) else f"the mean difference is {noise}"
    except _OtherRankFailedError:
        return Unmeasured("")
    except Exception as error:
        noise, failure = 0.0, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    try:
        _require_all(failure is None, world)
    except _OtherRankFailedError:
        return Unmeasured(failure or "")
    return noise


def _logprobs(policy: Policy, tokens: PackedTokens, dtype: torch.dtype, world: World) -> Tensor:
    """Return the [N] log-probabilities of the response tokens, computed in `dtype` with weights rounded to bfloat16."""
    model = policy.model
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    inside = {module for unit in units for module in unit.modules()}
    with ExitStack() as stack:
        stack.enter_context(_without_hooks(units))
        stack.enter_context(_gathered([module for module in model.modules() if module not in inside], dtype, world))
        for unit in units:
            _gather_in_forward(unit, dtype, world, stack)
        plain = Policy(model, temperature=policy.temperature, chunk_tokens=policy.chunk_tokens)
        plain.vision = policy.vision
        return plain(tokens).logprobs


@contextmanager
def _without_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Remove the modules' forward hooks inside the block."""
    kept = [(hooks, dict(hooks)) for module in modules for hooks in (module._forward_pre_hooks, module._forward_hooks)]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in kept:
            hooks.update(own)


def _gather_in_forward(unit: nn.Module, dtype: torch.dtype, world: World, stack: ExitStack) -> None:
    """Hold the gathered parameters of a unit during its forward pass, and cast its inputs as FSDP does, until the stack is closed."""
    held = stack.enter_context(ExitStack())
    modules = list(unit.modules())

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        held.enter_context(_gathered(modules, dtype, world))
        return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs))

    before = unit.register_forward_pre_hook(enter, with_kwargs=True)
    after = unit.register_forward_hook(lambda *_: held.close())
    stack.callback(before.remove)
    stack.callback(after.remove)


@contextmanager
def _gathered(modules: Iterable[nn.Module], dtype: torch.dtype, world: World) -> Iterator[None]:
    """Replace the parameters that these modules hold themselves by full ones of `dtype`, rounded to bfloat16. A collective.

    A parameter of several modules is gathered once. Raises _OtherRankFailedError if another rank has failed.
    """
    held = [(module, name, own) for module in modules for name, own in module._parameters.items() if own is not None]
    originals = {id(own): own for *_, own in held}
    _reserve(originals.values(), dtype, world)
    full = {key: _full(own, dtype) for key, own in originals.items()}
    try:
        for module, name, own in held:
            module.register_parameter(name, full[id(own)])
        yield
    finally:
        for module, name, own in held:
            module.register_parameter(name, own)


def _full(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    rounded = full_tensor(parameter.detach().to(torch.bfloat16))
    return nn.Parameter(rounded.to(dtype), requires_grad=False)


def _reserve(parameters: Iterable[Tensor], dtype: torch.dtype, world: World) -> None:
    """Make sure, before the ranks gather them, that there is memory for full parameters of `dtype` and for gathering the largest one.

    A rank that ran out of memory in a gather would leave the others waiting. Raises OutOfMemoryError if this rank lacks memory, or
    _OtherRankFailedError if another rank has failed.
    """
    sizes = [parameter.numel() for parameter in parameters] or [0]
    torch.empty(sum(sizes) * dtype.itemsize + 2 * max(sizes) * torch.bfloat16.itemsize, dtype=torch.uint8, device=world.device)
    _require_all(True, world)


class _OtherRankFailedError(Exception):
    """Raised on a rank whose pass ends because another rank's has failed."""


def _require_all(is_fine: bool, world: World) -> None:
    """Raise _OtherRankFailedError on all ranks unless all of them are fine. A collective."""
    if world.sum(torch.tensor(float(not is_fine), device=world.device)):
        raise _OtherRankFailedError
