"""Cases at sizes that users train: many tokens in a step, or a wide model.

Rounding grows with the number of terms of a sum, so what holds for a few dozen tokens says little of thousands.
"""

from typing import Any

from hypothesis import reject
from hypothesis import strategies as st

from shardproof.reference.case import Case, CaseError
from shardproof.suites.drawing.strategies import every_word

TOKENS = (1024, 4096, 16_384)
"""Tokens of a step that a long case has, about."""
HIDDEN = (256, 1024, 2048)
"""Hidden sizes that a wide case has, about."""
_LONGEST = 512
"""Tokens of the longest sequence that is made of a short one: scores grow with the square."""
_PACKED = 2048
"""Tokens of the longest row of packs, which is one sequence to the dense model: 12 heads have scores of 400 MB."""
_STEPS = 2
_INNER = 4096
"""The largest number of inner features of an MLP."""


@st.composite
def large(draw: st.DrawFn, /, mode: str, **fixed: Any) -> Case:
    """A case of this mode as `every_word` draws them, with many tokens or a wide model, and two steps at most."""
    case = draw(every_word(mode, **fixed))
    words = draw(_long(case) if draw(st.booleans(), label="many tokens") else _wide(case))
    try:
        return case.but(**words, steps=case.steps if "steps" in fixed else min(case.steps, _STEPS))
    except CaseError:
        reject()  # a rule that ties a size to another word


@st.composite
def _long(draw: st.DrawFn, /, case: Case) -> dict[str, Any]:
    """Longer sequences and more of them: about as many tokens in a step as one of TOKENS."""
    longest = max(_LONGEST // case.seq, 1)
    times = draw(st.sampled_from([times for times in (1, 4, 16, 64) if times <= longest]), label="longer")
    now = case.seq * times * case.micro * case.dp
    batch = draw(st.sampled_from(TOKENS), label="tokens") // now
    most = _PACKED // (case.seq * times) if case.rows == 1 else batch
    return {"seq": case.seq * times, "batch": max(min(batch, most), 1)}


@st.composite
def _wide(draw: st.DrawFn, /, case: Case) -> dict[str, Any]:
    """Wider heads and more inner features: a hidden size of about one of HIDDEN."""
    times = max(draw(st.sampled_from(HIDDEN), label="hidden") // case.hidden, 1)
    return {"hidden": case.hidden * times, "ffn": case.ffn * min(times, max(_INNER // case.ffn, 1))}
