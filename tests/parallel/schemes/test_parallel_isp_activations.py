"""What flows through an isp model: activations and their gradients are the dense ones, shapes are those of seed 000.

Also how calls are issued: prefetched gathers and reduce-scatters are asynchronous, and precision is the dtype's.
"""

from __future__ import annotations

from collections import Counter

import pytest

from harness.engines.threads.inproc import InprocEngine
from harness.running.ranks.execution import execute
from parallel.subject import subject
from reference.case import Case

EVO = "mode=isp family=internlm2 vocab=264 steps=1 micro=1"


@pytest.mark.parametrize("overlap", [True, False])
def test_what_is_prefetched_is_asynchronous(overlap: bool) -> None:
    """Gathers of blocks travel ahead under overlap only; gradients always travel during the next product."""
    case = Case.parse(f"{EVO} tp=2 layers=2").but(overlap=overlap)
    with InprocEngine() as engine:
        events = execute(case, subject, engine, text="").events
    kinds = Counter((e.op, e.is_async) for e in events if e.axis == "wp" and e.region.startswith("layers."))
    assert kinds == {("all_gather", overlap): 2 * 2 * 2 * 5, ("reduce_scatter", True): 2 * 2 * 5}
