"""Conversion of a Hugging Face checkpoint to a distributed one; every process writes a share of the tensors."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from fuligo.errors import CheckpointError
from fuligo.formats.checkpoint_files import MODEL_FILES, RELEASE, TRACKER, UNFINISHED, copy_model_files
from fuligo.formats.disk import replace_text, sync, sync_tree, write_manifest
from fuligo.formats.hf_tensors import DTYPES
from fuligo.formats.hugging_face import StoredTensor, read_config_json, read_stored_tensors
from fuligo.formats.shards import Unread, write_format, write_shards
from fuligo.models.names import ModelNames, Weight
from fuligo.models.registry import names_of
from fuligo.trainer.megatron_backend.weights.forms import read_shard
from fuligo.trainer.megatron_backend.weights.stored import StoredWeights
from fuligo.trainer.ranks.world import World


def hf_to_dist(source: Path, target: Path, world: World) -> None:
    """Convert a Hugging Face checkpoint to the distributed checkpoint `release` in `target`, and write the tracker. A collective.

    Weights keep their dtypes, and MTP layers are included if the checkpoint has their weights. `release` appears when it is complete.
    Raises CheckpointError on every rank if the checkpoint is damaged, or the target cannot be written.
    """
    names = names_of(read_config_json(source), str(source / "config.json"))
    unfinished, final = target / f"{UNFINISHED}{RELEASE}", target / RELEASE
    _check_target(target)
    headers = read_stored_tensors(source)
    num_mtp_layers = _num_mtp_layers(headers, names)
    with StoredWeights(source, names, num_mtp_layers) as stored:
        share = list(_share(stored, names.weights(num_mtp_layers), headers, names, world))
        _on_first(world, lambda: _begin(unfinished, source))
        write_shards(unfinished, share, world.objects)
    _on_first(world, lambda: _finish(unfinished, final))


def _check_target(target: Path) -> None:
    """Check that `target` is empty, or contains only leftovers of an interrupted conversion. Raises CheckpointError if not."""
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"cannot write to {target}: it is a file; use a directory with --save")
    if (target / RELEASE).exists():
        raise CheckpointError(f"cannot write {target / RELEASE}: it already exists; remove it or use another directory with --save")
    if (target / "config.json").exists():  # the tracker would hide its weights
        raise CheckpointError(f"cannot write to {target}: it is a Hugging Face directory; use another directory with --save")
    if (target / TRACKER).exists() and (target / TRACKER).read_text().strip() != RELEASE:
        raise CheckpointError(
            f"cannot write to {target}: it holds a run's checkpoints, which could no longer be resumed; use another --save"
        )
    others = sorted({path.name for path in target.iterdir()} - {TRACKER, f"{UNFINISHED}{RELEASE}"}) if target.exists() else []
    if others:
        shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise CheckpointError(f"cannot write to {target}: it holds other files ({shown}); use another directory with --save")


def _begin(unfinished: Path, source: Path) -> None:
    shutil.rmtree(unfinished, ignore_errors=True)  # a crash may have left it
    unfinished.mkdir(parents=True)
    write_format(unfinished)
    copy_model_files(source, unfinished / MODEL_FILES)


def _finish(unfinished: Path, final: Path) -> None:
    write_manifest(unfinished)
    sync_tree(unfinished)
    unfinished.rename(final)
    sync(final.parent)
    replace_text(final.parent / TRACKER, RELEASE)


def _share(
    stored: StoredWeights, weights: Iterable[Weight], headers: Mapping[str, StoredTensor], names: ModelNames, world: World
) -> Iterator[Unread]:
    """Yield this rank's weights; each weight goes to the rank with the least to write so far."""
    loads = [0] * world.size
    for weight in weights:
        rank = loads.index(min(loads))
        loads[rank] += prod(weight.shape)
        name = stored.parts(weight)[0].name
        if headers[name].dtype not in DTYPES:
            raise CheckpointError(f"cannot convert {name}: training cannot start from dtype {headers[name].dtype}; use the bf16 checkpoint")
        if rank == world.rank:
            yield Unread(weight.megatron, weight.shape, DTYPES[headers[name].dtype], partial(_read, stored, weight, names))


def _read(stored: StoredWeights, weight: Weight, names: ModelNames) -> Tensor:
    """Read a whole weight in Megatron's layout."""
    return read_shard(weight, stored.parts(weight), names.architecture, 0, 1)


def _num_mtp_layers(headers: Mapping[str, StoredTensor], names: ModelNames) -> int:
    """Return the number of MTP layers in the files, which may be smaller than that in config.json."""
    total = len(names.architecture.mtp_layers)
    missing = [weight for weight in names.weights() if weight.megatron.startswith("mtp.") and weight.checkpoint[0] not in headers]
    return min((int(weight.megatron.split(".")[2]) for weight in missing if weight.all_experts is None), default=total)


def _on_first(world: World, work: Callable[[], None]) -> None:
    """Run `work` on rank 0 while the other ranks wait. A collective. Raises CheckpointError on every rank if `work` failed."""
    problem: list[str | None] = [None]
    if world.rank == 0:
        try:
            work()
        except (OSError, CheckpointError) as error:
            problem = [str(error)]
    if world.size > 1:
        dist.broadcast_object_list(problem, src=0, group=world.objects)
    if problem[0] is not None:
        raise CheckpointError(problem[0])
