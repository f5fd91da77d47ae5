"""How the command ends: what is left is not collected, but where native code would report it as leaked."""

from __future__ import annotations

import gc
import sys

import pytest

from shardproof.__main__ import main


def test_what_is_left_is_collected_where_nanobind_would_report_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.15 loads triton, whose types are nanobind's: 27 lines on standard error after each verdict."""
    frozen: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append("frozen"))
    monkeypatch.setattr(sys, "argv", ["shardproof", "help", "slice"])
    meta = type("nb_type_0", (type,), {"__module__": "nanobind"})
    bound = [meta("Block", (), {})]
    assert (main(), frozen) == (0, [])
    bound.clear()
    gc.collect()
    if "triton._C.libtriton" not in sys.modules:
        assert (main(), frozen) == (0, ["frozen"])
