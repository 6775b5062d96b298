"""Split of the layers over pipeline ranks, as in Megatron-Core (`transformer_block.get_num_layers_to_build`)."""

from fuligo.errors import ConfigError
from fuligo.layout.megatron import layout_of
from fuligo.models.architecture import Architecture, Layer
from fuligo.planner.plan import Stage
from fuligo.planner.subject import Subject

EMBEDDING_COUNTS = "account_for_embedding_in_pipeline_split"
LOSS_COUNTS = "account_for_loss_in_pipeline_split"


def stages(subject: Subject) -> tuple[Stage, ...]:
    """Return the stages in the order in which a token passes them: all pipeline ranks for each virtual rank.

    Raises:
        ConfigError: the layers cannot be split so.
    """
    shape = layout_of(subject.config)
    counts = _layers_of_chunks(subject, shape.pp, shape.vpp)
    built, first_layer = [], 0
    for virtual_rank in range(shape.vpp):
        for pipeline_rank in range(shape.pp):
            count = counts[virtual_rank][pipeline_rank]
            last = (pipeline_rank, virtual_rank) == (shape.pp - 1, shape.vpp - 1)
            layers = subject.architecture.layers[first_layer : first_layer + count]
            built.append(
                Stage(
                    pipeline_rank=pipeline_rank,
                    virtual_rank=virtual_rank,
                    first_layer=first_layer,
                    num_layers=count,
                    index_layers=tuple(layer.number for layer in layers if layer.computes_index),
                    has_embedding=(pipeline_rank, virtual_rank) == (0, 0),
                    has_head=last,
                )
            )
            first_layer += count
    return tuple(built)


def stage_layers(architecture: Architecture, stage: Stage) -> tuple[Layer, ...]:
    """Return the layers of a stage, without MTP layers."""
    return architecture.layers[stage.first_layer : stage.first_layer + stage.num_layers]


def _layers_of_chunks(subject: Subject, pp: int, vpp: int) -> list[list[int]]:
    """Return the number of layers by [virtual rank][pipeline rank]."""
    megatron = subject.config.megatron
    if megatron.get("pipeline_model_parallel_layout") is not None:
        raise ConfigError("--pipeline-model-parallel-layout is not supported; use --decoder-first/last-pipeline-num-layers")
    embedding, loss = bool(megatron.get(EMBEDDING_COUNTS)), bool(megatron.get(LOSS_COUNTS))
    counts = []
    for pipeline_rank, num_layers in enumerate(_layers_of_ranks(subject, pp, embedding + loss)):
        if num_layers % vpp:
            raise ConfigError(
                f"--virtual-pipeline-model-parallel-size {vpp} does not divide the {num_layers} layers of pipeline rank {pipeline_rank}"
            )
        counts.append([num_layers // vpp] * vpp)
    counts[0][0] -= embedding
    counts[-1][-1] -= loss
    return [[chunks[virtual_rank] for chunks in counts] for virtual_rank in range(vpp)]


def _layers_of_ranks(subject: Subject, pp: int, num_extra: int) -> list[int]:
    """Return the layers of each pipeline rank, including an embedding or a loss that counts as a layer (`num_extra`)."""
    flags = subject.config.parallel
    num_layers = subject.architecture.num_layers
    first, last = flags.decoder_first_pipeline_num_layers, flags.decoder_last_pipeline_num_layers
    if num_extra and (first is not None or last is not None):
        raise ConfigError("--account-for-embedding/loss-in-pipeline-split cannot be combined with --decoder-first/last-pipeline-num-layers")
    if pp == 1:
        return [num_layers + num_extra]
    num_middle = pp - (first is not None) - (last is not None)
    rest = num_layers + num_extra - (first or 0) - (last or 0)
    if rest < 0 or (rest and not num_middle) or (num_middle and rest % num_middle):
        given = "".join(
            f"{', ' if i else ''}{name} {count}"
            for i, (name, count) in enumerate(
                (name, count)
                for name, count in (("--decoder-first-pipeline-num-layers", first), ("--decoder-last-pipeline-num-layers", last))
                if count is not None
            )
        )
        raise ConfigError(
            f"--pipeline-model-parallel-size {pp}{' with ' + given if given else ''} leaves {rest} of {num_layers} layers to "
            f"{num_middle} stages, which cannot share them equally"
        )
    middle = [rest // num_middle] * num_middle if num_middle else []
    return ([] if first is None else [first]) + middle + ([] if last is None else [last])
