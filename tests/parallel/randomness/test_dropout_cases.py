"""Dropout in every mode and scheme: the dense model with the same masks; masks that depend on no layout."""

from __future__ import annotations

import pytest

from reference.case import Case


def test_words_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="random=stateful: is where masks come from"):
        Case.parse("random=stateful")
    with pytest.raises(ValueError, match=r"attention_dropout=1.0: must lie in \[0, 1\)"):
        Case.parse("attention_dropout=1")
