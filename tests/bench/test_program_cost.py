"""The cost of recording a program, at a shape that takes no time: steps of both kinds, all calls recorded."""

from __future__ import annotations

import json
import subprocess
import sys


def test_pairs_of_steps_are_timed_and_their_calls_recorded() -> None:
    tiny = "cost.LAYERS, cost.HIDDEN, cost.HEADS, cost.VOCAB, cost.SEQ = 1, 8, 2, 11, 4"
    code = f"from bench import program_cost as cost; {tiny}; cost.main(3)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    seconds = json.loads(done.stdout)
    assert [len(seconds[name]) for name in ("off", "on")] == [3, 3]
    assert min(seconds["on"]) > 0
