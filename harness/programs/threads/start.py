"""The command that runs a program's ranks as threads: `python start.py RANKS SESSION [-m] PROGRAM ARGUMENTS`.

Run by the Python of the program, which may lack shardproof. The program then finds it behind all that is its own.
"""

import importlib.util
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.pop(0)  # this folder
    if importlib.util.find_spec("shardproof") is None:
        sys.path.append(str(Path(__file__).resolve().parents[4]))
    from shardproof.harness.programs.threads.program import run_program

    sys.exit(run_program(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
