"""The campaign: plants every bug of `bugs/places` and prints which module the failure names.

    python -m bench.places [--held-back] [--only WORD]

Exit status 1 when a place is wrong or a bug is not noticed. Megatron's bugs need the extra `peers`.
"""

import argparse
import sys
import warnings
from collections.abc import Sequence

from bench.places.planting import bugs_of, found, is_right, missing


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign and print one line a bug, then how many places were right."""
    parser = argparse.ArgumentParser(prog="bench.places", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="bugs whose name contains this")
    parser.add_argument("--held-back", action="store_true", help="those that the search was not written on")
    given = parser.parse_args(arguments)
    bugs = bugs_of("held_back/places" if given.held_back else "places")
    chosen = [bug for name, bug in bugs.items() if given.only in name]
    if away := sorted({package for bug in chosen if (package := missing(bug))}):
        print(f"not run: bugs of {' '.join(away)}, which is not installed (extra `peers`)")
    seen = right = 0
    for bug in chosen:
        if missing(bug):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron's own
            at = found(bug)
        good = is_right(at, bug)
        seen, right = seen + 1, right + good
        wanted = "" if good else f", not {bug.phase} of {bug.region}"
        print(f"{'right' if good else 'WRONG'}  {bug.name}: {at or 'not noticed'}{wanted}", flush=True)
    print(f"{right} of {seen} places are right")
    return int(right < seen)


if __name__ == "__main__":
    sys.exit(main())
