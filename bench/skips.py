"""Tests that no run of the suite has run, found in the reports of runs in different environments.

    python -m bench.skips REPORT...

A report is the `tests.xml` that `make test` leaves in the folder of its environment. Exit status 1 names each test
that is skipped in every report, with the reasons; those of `NOWHERE` may be. Nothing is printed when there is none.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

NOWHERE: Mapping[str, str] = {
    "--hypothesis-profile deep": "repetitions in other forms, an hour in all: run by hand, in the profile of that name",
    "CUDA device": "needs a GPU, or two: run by hand on such a machine",
    "needs HolisticTraceAnalysis": "it brings all of JupyterLab: run by hand in an environment that has it",
    "needs torchtitan": "it needs a torch built in the same week: run by hand in an environment that has both",
    "names no checkout": "picotron, nanotron and InternEvo are in no package index: run where variables name checkouts",
    "SHARDPROOF_TRACES": "traces of other projects, not ours to ship: run where the variable names their folder",
    "needs --ledger-baseline": "an option of the suites: tests/suites/test_own_words.py gives it, in a run of its own",
}
"""Part of a reason to skip -> why no environment of CI can run tests that are skipped for it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the reports. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="bench.skips", description="tests that are skipped in every run")
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT")
    found = skipped_everywhere([report(path) for path in parser.parse_args(arguments).reports])
    for test, reasons in found.items():
        print(f"{test}: is skipped in every run ({'; '.join(reasons)})", file=sys.stderr)
    return 1 if found else 0


def report(path: Path) -> dict[str, str]:
    """Every test of a report -> its reason to be skipped, empty when it has run. A known failure has run.

    A test is `module.Class::name`. If a module is skipped as a whole, the report has only the module. Raises SystemExit
    for a report without tests.
    """
    found = {}
    for case in ElementTree.parse(path).iter("testcase"):
        name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
        skip = case.find("skipped")
        found[name] = "" if skip is None or skip.get("type") == "pytest.xfail" else _reason(skip)
    if not found:
        raise SystemExit(f"{path}: names no test; legal: the tests.xml of a run of the suite")
    return found


def has_run(address: str, report: Mapping[str, str]) -> bool:
    """Whether a test has run by this report; `address` is pytest's: `tests/test_a.py::Class::name[word]`."""
    place, bracket, words = address.partition("[")
    *places, name = place.replace("/", ".").replace(".py::", "::", 1).split("::")
    return report.get("::".join((".".join(places), f"{name}{bracket}{words}"))) == ""


def _reason(skip: ElementTree.Element) -> str:
    """The reason of a skip. For a module that is skipped as a whole only the text has it, after path and line."""
    text = str(skip.text).strip()
    return skip.get("message", text) if skip.get("type") == "pytest.skip" else text


def skipped_everywhere(reports: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Every test that has run in no report, with its reasons, unless one of them is in `NOWHERE`."""
    ran = {test for tests in reports for test, reason in tests.items() if not reason}
    ran |= {place for test in ran for place in _enclosing_places(test.partition("::")[0])}
    left: dict[str, list[str]] = {}
    for tests in reports:
        for test in tests.keys() - ran:
            left.setdefault(test, []).append(tests[test])
    return {test: list(dict.fromkeys(left[test])) for test in sorted(left) if not _is_nowhere(left[test])}


def _enclosing_places(place: str) -> Iterable[str]:
    """A place and all that contain it: the class of a test, its module, packages."""
    words = place.split(".")
    return (".".join(words[:end]) for end in range(1, len(words) + 1))


def _is_nowhere(reasons: Iterable[str]) -> bool:
    return any(part in reason for part in NOWHERE for reason in reasons)


if __name__ == "__main__":
    sys.exit(main())
