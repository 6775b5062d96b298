"""Split of the layers over pipeline ranks, as in Megatron-Core (`transformer_block.get_num_layers_to_build`)."""

from dataclasses import dataclass

from fuligo.errors import ConfigError
from fuligo.layout.megatron import layout_of
from fuligo.models.architecture import Architecture, Layer
from fuligo.planner.plan import Stage
from fuligo.planner.subject import Subject

ACCOUNTING = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


@dataclass(frozen=True, slots=True)
class Cut:
    """Flags that split the layers into stages."""

    num_layers: int
    num_extra: int
    """Embedding and loss, if each counts as a layer."""
    pp: int
    vpp: int
    first: int | None
    last: int | None

    def counts(self) -> list[int] | None:
        """Return the layers of each pipeline rank, extra ones included, or None if they cannot be split so."""
        num_middle = self.pp - (self.first is not None) - (self.last is not None)
        rest = self.num_layers + self.num_extra - (self.first or 0) - (self.last or 0)
        if num_middle < 0 or rest < 0 or bool(rest) != bool(num_middle) or (num_middle and rest % num_middle):
            return None
        middle = [rest // num_middle] * num_middle if num_middle else []
        return ([] if self.first is None else [self.first]) + middle + ([] if self.last is None else [self.last])

    def starts(self) -> list[int]:
        """Return the first layer of every virtual stage, from 0; empty if the layers cannot be split so."""
        counts = self.counts()
        if counts is None or any(count % self.vpp for count in counts):
            return []
        chunks = [count // self.vpp for _ in range(self.vpp) for count in counts]
        return [sum(chunks[:number]) for number in range(len(chunks))]

    def shown(self) -> str:
        """Return ` with --decoder-first-pipeline-num-layers 14`, or nothing."""
        named = {"--decoder-first-pipeline-num-layers": self.first, "--decoder-last-pipeline-num-layers": self.last}
        given = [f"{option} {count}" for option, count in named.items() if count is not None]
        return f" with {' and '.join(given)}" if given else ""

    def why_uneven(self) -> str:
        extra = f" ({self.num_extra} counted for embedding and loss)" if self.num_extra else ""
        total, given = self.num_layers + self.num_extra, (self.first or 0) + (self.last or 0)
        num_middle = self.pp - (self.first is not None) - (self.last is not None)
        if num_middle > 0 and given < total:
            stages = f"{num_middle} middle stages" if given else f"{num_middle} stages"
            return f"{stages} cannot share {total - given}{f' of {total}' if given else ''} layers{extra} equally"
        return f"the given stages have {given} layers, the model has {total}{extra}, and {max(num_middle, 0)} stages are left"


def stages(subject: Subject) -> tuple[Stage, ...]:
    """Return the stages in the order in which a token passes them: all pipeline ranks for each virtual rank.

    Raises:
        ConfigError: the layers cannot be split so.
    """
    shape, megatron = layout_of(subject.config), subject.config.megatron
    if megatron.get("pipeline_model_parallel_layout") is not None:
        raise ConfigError("--pipeline-model-parallel-layout is not supported; use --decoder-first/last-pipeline-num-layers")
    embedding, loss = (bool(megatron.get(name)) for name in ACCOUNTING)
    first, last = shape.num_layers_first_stage, shape.num_layers_last_stage
    if (embedding or loss) and (first, last) != (None, None):
        raise ConfigError("--account-for-embedding/loss-in-pipeline-split cannot be combined with --decoder-first/last-pipeline-num-layers")
    cut = Cut(subject.architecture.num_layers, embedding + loss, shape.pp, shape.vpp, first, last)
    counts = cut.counts() if shape.pp > 1 else [cut.num_layers + cut.num_extra]
    if counts is None:
        raise ConfigError(f"--pipeline-model-parallel-size {shape.pp}{cut.shown()}: {cut.why_uneven()}")
    for pipeline_rank, num_layers in enumerate(counts):
        if num_layers % shape.vpp:
            raise ConfigError(
                f"--virtual-pipeline-model-parallel-size {shape.vpp} does not divide the {num_layers} layers of pipeline rank "
                f"{pipeline_rank}"
            )
    chunks = [num_layers // shape.vpp for _ in range(shape.vpp) for num_layers in counts]
    chunks[0] -= embedding
    chunks[-1] -= loss
    built, first_layer = [], 0
    for number, num_layers in enumerate(chunks):
        virtual_rank, pipeline_rank = divmod(number, shape.pp)
        layers = subject.architecture.layers[first_layer : first_layer + num_layers]
        built.append(
            Stage(
                pipeline_rank=pipeline_rank,
                virtual_rank=virtual_rank,
                first_layer=first_layer,
                num_layers=num_layers,
                index_layers=tuple(layer.number for layer in layers if layer.computes_index),
                has_embedding=number == 0,
                has_head=number == len(chunks) - 1,
            )
        )
        first_layer += num_layers
    return tuple(built)


def stage_layers(architecture: Architecture, stage: Stage) -> tuple[Layer, ...]:
    """Return the layers of a stage, without MTP layers."""
    return architecture.layers[stage.first_layer : stage.first_layer + stage.num_layers]
