"""Every rule of the dense model that may not be kept: those of data and model, then those of features."""

from reference.what_ifs import attention, data, edges, metrics, modules, slices, tables, training, weights
from reference.what_ifs.what_if import WhatIf

_FILES = (data, slices, weights, tables, edges, attention, modules, training, metrics)


def what_ifs() -> tuple[WhatIf, ...]:
    """The rules, in the order in which they are tried."""
    return tuple(what_if for file in _FILES for what_if in file.WHAT_IFS)
