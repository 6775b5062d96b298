"""Plans made by hand, for tests of their display: 8, 64 and 256 GPUs with plausible figures."""

from dataclasses import dataclass, replace

from fuligo.config.findings import Change, Finding, Severity
from fuligo.planner.plan import (
    ClusterLayout,
    EngineCapacity,
    EngineGroup,
    EngineRank,
    MemoryBar,
    MemoryItem,
    Phase,
    PlacedGpu,
    Plan,
    Stage,
    Suggestion,
    TrainerRank,
)

GIB = 1024**3
GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the trainer's dimensions; each rank is a GPU."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def rank(self, rank: int) -> TrainerRank:
        """Return the ranks: tp varies fastest, then cp, dp, pp; each `ep` consecutive ranks of a stage share the experts."""
        tp, rest = rank % self.tp, rank // self.tp
        cp, rest = rest % self.cp, rest // self.cp
        dp, pp = rest % self.dp, rest // self.dp
        within_stage = rank % (self.num_ranks // self.pp)
        return TrainerRank(rank, tp, cp, dp, pp, within_stage % self.ep, 0, within_stage // self.ep)


def stages(layers: tuple[int, ...], index_layers: tuple[int, ...] = ()) -> tuple[Stage, ...]:
    """Return one stage per pipeline rank with these numbers of layers."""
    made = []
    for number, count in enumerate(layers):
        first = sum(layers[:number])
        computing = tuple(layer for layer in index_layers if first <= layer < first + count)
        made.append(Stage(number, 0, first, count, computing, number == 0, number == len(layers) - 1))
    return tuple(made)


def layout(
    sizes: Sizes, layers: tuple[int, ...], groups: tuple[EngineGroup, ...], *, colocate: bool, index_layers: tuple[int, ...] = ()
) -> ClusterLayout:
    """Place the trainer on the first GPUs, the engines in order on the same or the following ones."""
    engines: list[EngineRank] = []
    number = 0
    for index, group in enumerate(groups):
        for _ in range(group.num_engines):
            engines += [
                EngineRank(index, number, rank, rank % group.tp, rank // group.tp, rank % group.dp if group.dp else 0, rank % group.ep)
                for rank in range(group.num_gpus_per_engine)
            ]
            number += 1
    offset = 0 if colocate else sizes.num_ranks
    num_gpus = max(sizes.num_ranks, offset + len(engines))
    gpus = tuple(
        PlacedGpu(
            index // GPUS_PER_NODE,
            index % GPUS_PER_NODE,
            sizes.rank(index) if index < sizes.num_ranks else None,
            engines[index - offset] if offset <= index < offset + len(engines) else None,
        )
        for index in range(num_gpus)
    )
    return ClusterLayout(
        num_nodes=-(-num_gpus // GPUS_PER_NODE),
        num_gpus_per_node=GPUS_PER_NODE,
        gpus=gpus,
        stages=stages(layers, index_layers),
        engine_groups=groups,
        tp=sizes.tp,
        cp=sizes.cp,
        pp=sizes.pp,
        ep=sizes.ep,
        etp=1,
        dp=sizes.dp,
    )


def trainer_bar(stage: int, num_gpus: int, weights_gib: float, *, capacity_gib: float = 80) -> MemoryBar:
    return MemoryBar(
        f"trainer stage {stage}",
        num_gpus,
        int(capacity_gib * GIB),
        (
            MemoryItem("weights", int(weights_gib * GIB), f"{weights_gib} GiB in bf16"),
            MemoryItem("gradients", int(2 * weights_gib * GIB), "fp32, one a weight"),
            MemoryItem("optimizer", int(0.5 * weights_gib * GIB), "two fp32 moments and the master weights, over dp x cp"),
            MemoryItem("activations", int(9.5 * GIB), "16384 tokens, full recompute"),
            MemoryItem("logits", int(4.2 * GIB), "chunks of 1024 tokens"),
            MemoryItem("communication", int(1.5 * GIB), "NCCL, DeepEP"),
            MemoryItem("runtime", int(2.1 * GIB), "CUDA context"),
        ),
        pipeline_rank=stage,
    )


def engine_bar(group: int, worker_type: str, num_gpus: int, weights_gib: float) -> MemoryBar:
    return MemoryBar(
        f"engines: {worker_type}",
        num_gpus,
        80 * GIB,
        (
            MemoryItem("weights", int(weights_gib * GIB), "fp8, experts over 64 ranks"),
            MemoryItem("kv_cache", int(32.4 * GIB), "the rest of mem_fraction_static 0.7"),
            MemoryItem("graphs", int(3.0 * GIB), "CUDA graphs"),
            MemoryItem("runtime", int(2.1 * GIB), "CUDA context"),
        ),
        engine_group=group,
    )


HOST = MemoryBar("host", 1, 2048 * GIB, (MemoryItem("optimizer", 410 * GIB, "CPU Adam"), MemoryItem("reference", 190 * GIB, "bf16 copy")))

PHASES = (
    Phase("rollout", "engines", 0.0, 212.0, 3.1e18, "decode reads weights and KV cache at 60% of 3.35 TB/s"),
    Phase("score", "trainer", 212.0, 31.0, 1.2e18, "forward at 35% of the peak"),
    Phase("train", "trainer", 243.0, 96.0, 4.8e18, "forward, backward and recompute at 35% of the peak; bubble 18%"),
    Phase("optimizer", "trainer", 339.0, 3.5, 0.0, "CPU Adam at 20 GB/s a socket"),
    Phase("sync", "engines", 342.5, 6.0, 0.0, "744 GB over NVLink"),
)


def plan_of_8() -> Plan:
    """Return a plan of a dense model, trainer and engines on the same 8 GPUs."""
    groups = (EngineGroup("default", "regular", 4, 2, 2, 1, 0, 1, 8),)
    return Plan(
        name="glm4-9b",
        model_type="glm4",
        num_parameters=9_400_279_040,
        num_active_parameters=9_400_279_040,
        num_mtp_parameters=0,
        num_adapter_parameters=0,
        gpu="h100-80",
        findings=(),
        layout=layout(Sizes(tp=2, cp=2, dp=2), (40,), groups, colocate=True),
        memory=(trainer_bar(0, 8, 8.8), engine_bar(0, "regular", 8, 8.8)),
        capacities=(EngineCapacity(0, 712_000, 43),),
        phases=PHASES,
        step_s=348.5,
        suggestions=(),
        assumptions=("Responses are half as long as they may be.", "The trainer reaches 35% of the GPUs' peak."),
    )


def plan_of_64() -> Plan:
    """Return a plan of an MoE model on 64 GPUs that does not fit: one error, one warning, suggestions."""
    groups = (EngineGroup("default", "regular", 2, 32, 32, 1, 4, 1, 64),)
    return Plan(
        name="glm4.5-355b",
        model_type="glm4_moe",
        num_parameters=352_800_000_000,
        num_active_parameters=33_600_000_000,
        num_mtp_parameters=5_400_000_000,
        num_adapter_parameters=0,
        gpu="h100-80",
        findings=(
            Finding(
                "PLAN-MEMORY-TRAINER",
                Severity.ERROR,
                "--max-tokens-per-gpu 16384: stage 0 needs 88.9 GiB of 80.0 GiB",
                ("--max-tokens-per-gpu",),
                (Change(("train", "max_tokens_per_gpu"), 8192),),
            ),
            Finding(
                "PLAN-LONG-SAMPLES",
                Severity.WARNING,
                "--max-tokens-per-gpu 16384 is shorter than the longest sample",
                ("--max-tokens-per-gpu",),
                advice="samples are never truncated; such a sample runs alone",
            ),
        ),
        layout=layout(Sizes(tp=8, cp=2, dp=1, pp=4, ep=16), (23, 23, 23, 23), groups, colocate=True),
        memory=(
            trainer_bar(0, 16, 20.2),
            *(trainer_bar(stage, 16, 15.0) for stage in (1, 2, 3)),
            engine_bar(0, "regular", 64, 11.0),
            HOST,
        ),
        capacities=(EngineCapacity(0, 2_150_000, 262),),
        phases=PHASES,
        step_s=348.5,
        suggestions=(
            Suggestion(("--recompute-granularity full", "--recompute-method uniform"), 20 * GIB, "+33% of the trainer's FLOPs"),
            Suggestion(("--max-tokens-per-gpu 8192",), 14 * GIB, "twice the micro-batches"),
            Suggestion(("--optimizer-cpu-offload",), 10 * GIB, "+21 s a step"),
        ),
        assumptions=("Responses are half as long as they may be.",),
    )


def plan_of_256() -> Plan:
    """Return a plan of GLM-5.2 with sparse attention, prefill and decode engines on the trainer's GPUs."""
    groups = (EngineGroup("default", "prefill", 1, 64, 64, 1, 64, 64, 64), EngineGroup("default", "decode", 3, 64, 64, 1, 64, 64, 192))
    computing = (0, 1, *range(2, 78, 4))
    layers = (14, 8, 8, 8, 8, 8, 8, 16)
    return Plan(
        name="glm5.2-744b",
        model_type="glm_moe_dsa",
        num_parameters=743_900_000_000,
        num_active_parameters=40_100_000_000,
        num_mtp_parameters=11_500_000_000,
        num_adapter_parameters=0,
        gpu="h100-80",
        findings=(),
        layout=layout(Sizes(tp=4, cp=8, dp=1, pp=8, ep=32), layers, groups, colocate=True, index_layers=computing),
        memory=(
            *(trainer_bar(stage, 32, 0.8 * count) for stage, count in enumerate(layers)),
            engine_bar(0, "prefill", 64, 15.9),
            engine_bar(1, "decode", 192, 15.9),
            HOST,
        ),
        capacities=(EngineCapacity(0, 9_400_000, 282), EngineCapacity(1, 9_400_000, 282)),
        phases=PHASES,
        step_s=348.5,
        suggestions=(),
        assumptions=("Responses are half as long as they may be.", "The trainer reaches 35% of the GPUs' peak."),
    )


def broken_plan(text: str = "--tensor-model-parallel-size 3 does not divide 32 heads") -> Plan:
    """Return a plan whose errors prevent a layout."""
    finding = Finding("PLAN-TP-HEADS", Severity.ERROR, text, ("--tensor-model-parallel-size",), advice="choose a divisor of 32")
    return replace(plan_of_8(), findings=(finding,), layout=None, memory=(), capacities=(), phases=(), step_s=0.0)
