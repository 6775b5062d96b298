"""Advantage estimators, one per module; --advantage-estimator takes the module's name."""

import importlib
import pkgutil
from typing import TYPE_CHECKING, Literal

from fuligo.algorithms.estimator import Estimator

ESTIMATORS: dict[str, Estimator] = {
    module.name: importlib.import_module(f"{__name__}.{module.name}").ESTIMATOR for module in pkgutil.iter_modules(__path__)
}
"""Estimators by name: the `ESTIMATOR` of every module of this package."""

if TYPE_CHECKING:
    EstimatorName = str
else:
    EstimatorName = Literal[tuple(ESTIMATORS)]
