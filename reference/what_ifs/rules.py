"""Every rule of the dense model that may not be kept: those in the table `WHAT_IFS` of a file of this folder."""

import pkgutil

from shardproof.reference import what_ifs as folder
from shardproof.reference.features import module_in
from shardproof.reference.what_ifs.what_if import WhatIf


def what_ifs() -> tuple[WhatIf, ...]:
    """The rules, file by file."""
    files = (module_in(folder.__name__, file.name) for file in pkgutil.iter_modules(folder.__path__))
    return tuple(what_if for file in files for what_if in getattr(file, "WHAT_IFS", ()))
