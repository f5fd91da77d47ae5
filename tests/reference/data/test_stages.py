"""What pipeline stages are sent, typed from Megatron's tables: keys in order, and bytes with and without a mask."""

from __future__ import annotations

import math

import pytest

from parallel.subject import subject
from reference.case import Case
from reference.data.stages import Form, sent_to_stage

ALL = "tokens labels loss_mask attention_mask positions"
TABLE = {
    (True, True, False): (ALL, 28),
    (True, False, False): ("tokens attention_mask positions", 16),
    (False, True, False): ("labels loss_mask attention_mask", 12),
    (False, False, False): ("", 0),
    (False, True, True): (ALL, 28),
    (False, False, True): (ALL, 28),
}
"""(first, last, prediction layers) -> keys, and bytes a token without a mask."""
ROWS, LENGTH = 3, 7
_ITEM_BYTES = {"int64": 8, "float32": 4, "bool": 1}


def sent_bytes(forms: dict[str, Form]) -> int:
    return sum(_ITEM_BYTES[dtype] * math.prod(shape) for dtype, shape in forms.values())


@pytest.mark.parametrize("stage", TABLE)
def test_keys_and_bytes_of_a_stage(stage: tuple[bool, bool, bool]) -> None:
    first, last, prediction = stage
    keys, per_token = TABLE[stage]
    found = {
        mask: sent_to_stage(ROWS, LENGTH, first=first, last=last, mask=mask, prediction=prediction)
        for mask in (False, True)
    }
    assert list(found[True]) == keys.split()
    assert list(found[False]) == [key for key in keys.split() if key != "attention_mask"]
    assert sent_bytes(found[False]) == per_token * 21
    assert sent_bytes(found[True]) == per_token * 21 + (147 if keys else 0)


@pytest.mark.parametrize("cp", [1, 2])
def test_the_closed_form_of_a_case_sends_these_bytes_to_its_stages(cp: int) -> None:
    """Whole rows, however many context ranks slice them."""
    case = Case.parse(f"pp=3 layers=3 batch=3 seq=8 micro=1 steps=1 cp={cp}")
    data = [term for term in subject.expected(case) if term.phase == "data"]
    sent = [sum(term.payload_bytes * term.calls for term in data if term.at == {"pp": stage}) for stage in range(3)]
    assert sent == [16 * 24 + 192, 0, 12 * 24 + 192]
