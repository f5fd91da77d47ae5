"""The campaign: plants every bug of `bench.places.bugs` and prints which module the failure names.

    python -m bench.places [--held-back] [--only WORD]

Exit status 1 when a place is wrong or a bug is not noticed. Megatron's bugs need the extra `peers`.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import warnings
from collections.abc import Sequence

from bench.places.bugs import BUGS, MEGATRON
from bench.places.held_back import HELD_BACK, MEGATRON_HELD_BACK, TUTORIALS
from bench.places.planting import found, found_in_megatron, is_right

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign and print one line a bug, then how many places were right."""
    parser = argparse.ArgumentParser(prog="bench.places", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="bugs whose name contains this")
    parser.add_argument("--held-back", action="store_true", help="those that the search was not written on")
    given = parser.parse_args(arguments)
    only, bugs, patches = (
        given.only,
        *(({**HELD_BACK, **TUTORIALS}, MEGATRON_HELD_BACK) if given.held_back else (BUGS, MEGATRON)),
    )
    seen = {name: (found(bug), bug.phase, bug.place) for name, bug in bugs.items() if only in name}
    if importlib.util.find_spec("megatron"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron's own
            seen |= {f"Megatron: {n}": (found_in_megatron(n), *at) for n, at in patches.items() if only in n}
    else:
        print("Megatron's bugs are not run: megatron-core is not installed (extra `peers`)")
    right = 0
    for name, (place, phase, module) in seen.items():
        good = is_right(place, phase, module)
        right += good
        print(
            f"{'right' if good else 'WRONG'}  {name}: {place or 'not noticed'}"
            + (f", not {phase} of {module}" if not good else "")
        )
    print(f"{right} of {len(seen)} places are right")
    return int(right < len(seen))


if __name__ == "__main__":
    sys.exit(main())
