"""Our implementation with a variant in it: a bug of `bugs/variants.txt`, planted in a second copy of this package.

The closed form stays that of the right mathematics.
"""

import threading
from functools import cache
from typing import Any

from shardproof.bugs.anchors import changed
from shardproof.bugs.planting import planted
from shardproof.reference.case.variants import VARIANTS

_LOCK = threading.Lock()


def deviating(variant: str) -> Any:
    """The subject that has this variant. Planted once a process; ranks that are threads wait for the first of them."""
    with _LOCK:
        return _planted(variant)


@cache
def _planted(variant: str) -> Any:
    return planted(changed(variant, VARIANTS[variant].changes))
