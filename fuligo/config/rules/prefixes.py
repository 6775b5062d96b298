"""Rules on --share-prefixes: rows that hold a prefix once need attention that supports token trees."""

from fuligo.config import Config
from fuligo.config.rules.rule import Violation, rule, unset_flag

_OFF = unset_flag("share_prefixes")


@rule("CFG-PREFIX-PROVIDER", "--share-prefixes", "--custom-model-provider-path")
def layers_know_trees(config: Config) -> Violation | None:
    """Reject shared prefixes with custom stages: their attention could read a tree as one sequence without an error."""
    path = config.model.custom_model_provider_path
    if not config.shares_prefixes or path is None:
        return None
    text = f"--share-prefixes on needs the attention of fuligo's own layers, but --custom-model-provider-path {path} may build others"
    return Violation(text, (_OFF,), flags=("--share-prefixes", "--custom-model-provider-path"))


@rule("CFG-PREFIX-KERNEL", "--share-prefixes", "--attention-backend")
def kernels_know_trees(config: Config) -> Violation | None:
    """Reject TransformerEngine's kernels with shared prefixes: they compute sequences, not token trees."""
    backend = config.parallel.attention_backend
    if not config.shares_prefixes or config.resolved_train_backend != "megatron" or backend in ("auto", "local"):
        return None
    text = f"--attention-backend {backend} with --share-prefixes on: TransformerEngine's kernels compute sequences, not trees"
    return Violation(text, (_OFF,), "or use --attention-backend local", ("--share-prefixes", "--attention-backend"))


@rule("CFG-PREFIX-ROWS", "--share-prefixes", "--micro-batch-size")
def rows_hold_several_samples(config: Config) -> Violation | None:
    """Reject shared prefixes with one sample per micro-batch: samples share prefixes only within a micro-batch."""
    train = config.train
    if train.share_prefixes != "on" or train.use_dynamic_batch_size or train.micro_batch_size != 1:
        return None
    text = "--share-prefixes on has no effect with --micro-batch-size 1: samples share prefixes only within a micro-batch"
    return Violation(text, (_OFF,), "or raise --micro-batch-size", ("--share-prefixes", "--micro-batch-size"))
