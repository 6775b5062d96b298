"""Rules on --share-prefixes: rows that hold a prefix once need attention that supports token trees."""

from collections.abc import Iterator

from fuligo.config import Config
from fuligo.config.rules.rule import Violation, rule, unset_flag

_OFF = unset_flag("share_prefixes")


@rule("CFG-PREFIX-PROVIDER", "--share-prefixes", "--custom-model-provider-path")
def layers_know_trees(config: Config) -> Iterator[Violation]:
    """Reject shared prefixes with custom stages: their attention could read a tree as one sequence without an error."""
    path = config.model.custom_model_provider_path
    if config.shares_prefixes and path is not None:
        text = f"--share-prefixes on needs the attention of fuligo's own layers, but --custom-model-provider-path {path} may build others"
        yield Violation(text, (_OFF,), flags=("--share-prefixes", "--custom-model-provider-path"))


@rule("CFG-PREFIX-KERNEL", "--share-prefixes", "--attention-backend")
def kernels_know_trees(config: Config) -> Iterator[Violation]:
    """Reject TransformerEngine's kernels with shared prefixes: they compute sequences, not token trees."""
    backend = config.parallel.attention_backend
    if config.shares_prefixes and config.resolved_train_backend == "megatron" and backend not in ("auto", "local"):
        text = f"--attention-backend {backend} with --share-prefixes on: TransformerEngine's kernels compute sequences, not trees"
        yield Violation(text, (_OFF,), "or use --attention-backend local", ("--share-prefixes", "--attention-backend"))


@rule("CFG-PREFIX-ROWS", "--share-prefixes", "--micro-batch-size")
def rows_hold_several_samples(config: Config) -> Iterator[Violation]:
    """Reject shared prefixes with one sample per micro-batch: samples share prefixes only within a micro-batch."""
    train = config.train
    if train.share_prefixes == "on" and not train.use_dynamic_batch_size and train.micro_batch_size == 1:
        text = "--share-prefixes on has no effect with --micro-batch-size 1: samples share prefixes only within a micro-batch"
        yield Violation(text, (_OFF,), "or raise --micro-batch-size", ("--share-prefixes", "--micro-batch-size"))
