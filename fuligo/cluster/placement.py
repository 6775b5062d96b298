"""Placement of a run's processes on the GPUs of nodes, with the same layout as in `fuligo plan`. Does not import Ray."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fuligo.config import Config
from fuligo.config.topology import engine_groups
from fuligo.errors import ConfigError
from fuligo.layout.slots import Slot, engine_gpus, engine_slots, trainer_slots


@dataclass(slots=True, frozen=True)
class Placement:
    """Slots of all ranks and engines. A slot is a GPU, or on a CPU a process."""

    node_sizes: tuple[int, ...]
    """Number of slots that the run uses on each node, in order."""
    ranks: tuple[Slot, ...]
    """(node, slot within the node) of each trainer rank; the order of ranks is the physical order."""
    engines: tuple[tuple[Slot, ...], ...]
    """Slots of each engine, in the order of its ranks."""


@dataclass(slots=True, frozen=True)
class EnginePart:
    """Part of an engine on one node."""

    node: int
    slots: tuple[int, ...]
    """Slots within the node."""


def place(config: Config) -> Placement:
    """Place trainer ranks first, then engines, which share the trainer's slots under --colocate.

    Slots of placeholder groups are reserved and stay free. Raises ConfigError if an engine would have unequal parts on its nodes.
    """
    per_node = max(config.cluster.num_gpus_per_node, config.resolved_actor_num_gpus_per_node)
    ranks = trainer_slots(config.num_train_gpus, config.resolved_actor_num_gpus_per_node) if config.trains else []
    groups = engine_groups(config)
    gpus = engine_slots(ranks, sum(group.num_gpus for group in groups), per_node, shares=config.shares_gpus)
    taken = sorted({*ranks, *gpus})
    # Renumber nodes and slots, leaving out those that are not taken.
    nodes = sorted({node for node, _ in taken})
    compact = {
        slot: (number, index) for number, node in enumerate(nodes) for index, slot in enumerate(slot for slot in taken if slot[0] == node)
    }
    placement = Placement(
        node_sizes=tuple(sum(slot[0] == node for slot in taken) for node in sorted({node for node, _ in taken})),
        ranks=tuple(compact[slot] for slot in ranks),
        engines=tuple(tuple(compact[gpus[number]] for number in numbers) for numbers in engine_gpus(groups)),
    )
    for number, engine in enumerate(placement.engines):
        engine_parts(engine, name=f"engine {number}")
    return placement


def engine_parts(slots: Sequence[Slot], *, name: str) -> tuple[EnginePart, ...]:
    """Split an engine's slots by node, in order.

    `name`: engine's name for the error. Raises ConfigError if the parts are unequal, because an engine is split evenly over its nodes.
    """
    nodes = list(dict.fromkeys(node for node, _ in slots))
    parts = tuple(EnginePart(node, tuple(index for its_node, index in slots if its_node == node)) for node in nodes)
    sizes = [len(part.slots) for part in parts]
    if len(set(sizes)) > 1:
        raise ConfigError(
            f"cannot place {name}: it would have {' and '.join(map(str, sizes))} GPUs on its nodes, but needs the same number on each; "
            "choose a --rollout-num-gpus-per-engine that divides --num-gpus-per-node, and a trainer size that leaves whole engines free"
        )
    return parts


def require_slots(node_sizes: Sequence[int], slots: Mapping[str, int]) -> None:
    """Raise ConfigError unless each node of the run can have a separate host with enough slots.

    `node_sizes`: slots that the run uses on each node. `slots`: number of slots by host.
    """
    needed, offered = sorted(node_sizes, reverse=True), sorted(slots.values(), reverse=True)
    if len(needed) > len(offered) or any(size > number for size, number in zip(needed, offered)):
        listed = ", ".join(f"{address} {number}" for address, number in slots.items())
        hosts = "host" if len(needed) == 1 else "hosts"
        raise ConfigError(
            f"cannot place the run: it needs {', '.join(map(str, node_sizes))} slots on {len(needed)} {hosts}, but the hosts have: "
            f"{listed}; add hosts or slots, or use fewer (--actor-num-nodes, --actor-num-gpus-per-node, --rollout-num-gpus)"
        )
