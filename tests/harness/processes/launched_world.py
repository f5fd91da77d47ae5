"""Programs of tests under torchrun: rank 0 tries things on its engine and prints a line of JSON for each.

The other ranks serve it.

torchrun --nproc-per-node 2 -m tests.harness.processes.launched_world is_killed world_size_3
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from shardproof.harness.engines.engine import Engine
from shardproof.harness.engines.processes.launched.torchrun import TorchrunEngine, is_to_serve, serve_driver
from shardproof.harness.errors import ShardproofError
from tests.harness.engines import programs

LIMIT_S = 2.0
PROGRAMS: dict[str, tuple[Any, ...]] = {"goes_right": (programs.summed,), "is_killed": (programs.calls_then, "kill")}
"""Name -> program and arguments."""


def tried(engine: Engine, name: str) -> dict[str, Any]:
    """Try a program by its name, `world_size_N`, or `kills_N`, which ends the launched process of rank N."""
    program, *arguments = PROGRAMS.get(name, (programs.where,))
    word, _, number = name.rpartition("_")
    if word == "kills":
        os.kill(engine.run(programs.where, world_size=2)[int(number)][1], 9)
        program = programs.summed
    world_size = int(number) if word == "world_size" else 2
    start_s = time.perf_counter()
    told: dict[str, Any] = {"name": name}
    try:
        told["value"] = engine.run(program, *arguments, world_size=world_size, timeout_s=LIMIT_S)
    except ShardproofError as error:
        told |= {"error": type(error).__name__, "message": str(error), "cause": type(error.__cause__).__name__}
    return {**told, "seconds": time.perf_counter() - start_s}


def main(names: Sequence[str]) -> int:
    if is_to_serve():
        return serve_driver()
    with TorchrunEngine() as engine:
        for name in names:
            print(json.dumps(tried(engine, name)), flush=True)
            if name != names[-1]:
                print(json.dumps(tried(engine, "goes_right")), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
