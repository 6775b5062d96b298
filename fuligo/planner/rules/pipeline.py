"""Split of the layers into pipeline stages.

Sources: Megatron-Core 0.16.1, `TransformerConfig.__post_init__` and `parallel_state.initialize_model_parallel`; PLAN-DSA-STAGE-START
follows from DSA's index sharing (GLM-5).
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from fuligo.config.findings import Change
from fuligo.config.flag import option_name
from fuligo.config.rules.rule import set_flag, unset_flag
from fuligo.planner.layout import ACCOUNTING, Cut
from fuligo.planner.rules.rule import Fix, Violation, divisors, nearest_first, rule
from fuligo.planner.subject import Subject
from fuligo.quantities import count

_FIRST, _LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
_VPP = "virtual_pipeline_model_parallel_size"


def _cut(subject: Subject) -> Cut | None:
    """Return the split, or None without Megatron or with an explicit layout."""
    config, sizes = subject.config, subject.config.parallel
    if not subject.is_megatron or config.megatron.get("pipeline_model_parallel_layout") is not None:
        return None
    embedding, loss = (bool(config.megatron.get(name)) for name in ACCOUNTING)
    return Cut(
        num_layers=subject.architecture.num_layers,
        embedding=embedding,
        loss=loss,
        pp=sizes.pipeline_model_parallel_size,
        vpp=sizes.virtual_pipeline_model_parallel_size or 1,
        first=sizes.decoder_first_pipeline_num_layers,
        last=sizes.decoder_last_pipeline_num_layers,
    )


def _recuts(subject: Subject, cut: Cut) -> tuple[Fix, ...]:
    """Return fixes with other first and last stages or other numbers of stages, the most even and nearest first."""
    computing = {layer.number for layer in subject.architecture.layers if layer.computes_index}
    even = cut.num_layers / cut.pp
    found: list[tuple[float, Fix]] = []
    for first, last in product((None, *range(1, cut.num_layers)), repeat=2):
        other = replace(cut, embedding=False, loss=False, first=first, last=last)
        counts = other.counts() if not cut.num_extra else None
        starts = other.starts() if counts else []
        if not counts or min(counts) < 1 or not starts or (computing and not computing.issuperset(starts)):
            continue
        changes = tuple(set_flag(name, value) for name, value, old in ((_FIRST, first, cut.first), (_LAST, last, cut.last)) if value != old)
        distance = abs((first or even) - (cut.first or even)) + abs((last or even) - (cut.last or even))
        # Uneven stages make the others wait, which is worse than changing one more flag.
        found.append((max(counts) - even + distance / 4 + len(changes) / 8 + 2 * (max(counts) - min(counts)) / cut.pp, changes))
    best = [fix for _, fix in sorted(found, key=lambda each: each[0])[:6] if fix]
    fewer = [(set_flag("pipeline_model_parallel_size", pp),) for pp in nearest_first(cut.pp, divisors(cut.num_layers + cut.num_extra))]
    plain = [(unset_flag(_FIRST), unset_flag(_LAST))] if (cut.first, cut.last) != (None, None) else []
    interleaved = [(unset_flag(_VPP),)] if cut.vpp > 1 else []
    return (*best, *interleaved, *plain, *fewer)


@rule("PLAN-PP-LAYOUT", "--pipeline-model-parallel-layout")
def layout_is_given_by_sizes(subject: Subject) -> Iterator[Violation]:
    """An explicit list of the layers of every stage is not supported."""
    config = subject.config
    layout = config.megatron.get("pipeline_model_parallel_layout")
    if subject.is_megatron and layout is not None:
        yield Violation(
            f"--pipeline-model-parallel-layout {layout} is not supported",
            ((Change(("megatron", "pipeline_model_parallel_layout"), None),),),
            "use --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers instead",
        )


@rule("PLAN-PP-ACCOUNTING", "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
def accounting_or_first_and_last(subject: Subject) -> Iterator[Violation]:
    """Megatron either counts embedding and loss as layers or uses the given first and last stage."""
    cut = _cut(subject)
    if cut is not None and cut.num_extra and (cut.first, cut.last) != (None, None):
        given = [name for name in ACCOUNTING if subject.config.megatron.get(name)]
        shown = " and ".join(option_name(name) for name in given)
        fix = tuple(Change(("megatron", name), None) for name in given)
        yield Violation(f"{shown} cannot be combined{cut.shown()}: both set the sizes of the stages", (fix,))


@rule("PLAN-PP-LAYERS", "--pipeline-model-parallel-size", "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
def layers_divide_into_stages(subject: Subject) -> Iterator[Violation]:
    """The first, the last and the equal middle stages must add up to all layers, and no stage may be empty."""
    cut = _cut(subject)
    if cut is None or (cut.num_extra and (cut.first, cut.last) != (None, None)):
        return
    counts = cut.counts()
    if counts is not None and min(counts) > 0:
        return
    text = f"--pipeline-model-parallel-size {cut.pp}{cut.shown()}: {cut.why_uneven()}"
    yield Violation(text, _recuts(subject, cut), f"choose stages that add up to {cut.num_layers} layers")


@rule("PLAN-VPP-PP", "--virtual-pipeline-model-parallel-size", "--pipeline-model-parallel-size")
def interleaving_needs_stages(subject: Subject) -> Iterator[Violation]:
    """Interleaving needs a pipeline of more than one stage."""
    cut = _cut(subject)
    if cut is not None and cut.vpp > 1 and cut.pp == 1:
        text = f"--virtual-pipeline-model-parallel-size {cut.vpp} needs --pipeline-model-parallel-size above 1"
        yield Violation(text, ((unset_flag(_VPP),),))


@rule("PLAN-VPP-LAYERS", "--virtual-pipeline-model-parallel-size", "--pipeline-model-parallel-size")
def ranks_divide_into_virtual_stages(subject: Subject) -> Iterator[Violation]:
    """Each pipeline rank splits its layers evenly over its virtual stages."""
    cut = _cut(subject)
    counts = None if cut is None else cut.counts()
    if cut is None or counts is None or cut.pp == 1 or all(number % cut.vpp == 0 for number in counts):
        return
    broken = next(number for number in counts if number % cut.vpp)
    common = [size for size in divisors(min(counts)) if size > 1 and all(number % size == 0 for number in counts)]
    yield Violation(
        f"--virtual-pipeline-model-parallel-size {cut.vpp} does not divide the {count(broken, 'layer')} of pipeline rank "
        f"{counts.index(broken)}{cut.shown()}",
        (*((set_flag(_VPP, size),) for size in nearest_first(cut.vpp, common)), (unset_flag(_VPP),)),
    )


@rule("PLAN-DSA-STAGE-START", "--pipeline-model-parallel-size", "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
def stages_start_on_computing_layers(subject: Subject) -> Iterator[Violation]:
    """A layer that reuses the sparse index of a layer below must be in the same stage as that layer."""
    cut = _cut(subject)
    computing = {layer.number for layer in subject.architecture.layers if layer.computes_index}
    if cut is None or not computing:
        return
    wrong = [start for start in cut.starts() if start not in computing and start < cut.num_layers]
    if not wrong:
        return
    starts = ", ".join(str(start + 1) for start in cut.starts())
    below = max(number for number in computing if number < wrong[0])
    yield Violation(
        f"--pipeline-model-parallel-size {cut.pp}{cut.shown()}: stages start at the layers {starts}, but layer {wrong[0] + 1} "
        f"reuses the sparse index of layer {below + 1}, which is in the previous stage",
        _recuts(subject, cut),
        f"every stage must start at one of the layers {', '.join(str(number + 1) for number in sorted(computing))}",
    )
