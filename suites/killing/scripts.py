"""Planted bugs as scripts that stand alone: shrunk to a small case, the right values inside, plain torch around it."""

import difflib
import itertools
from collections.abc import Iterator, Mapping

from shardproof.bugs.anchors import source_of
from shardproof.harness.dense_model import SUBJECT
from shardproof.harness.engines.engine import Engine
from shardproof.harness.errors import MachineError, RequestError
from shardproof.harness.reproducing.repro import emit
from shardproof.harness.running.engines import engine_named
from shardproof.harness.subject import NamedSubject, named
from shardproof.suites.mutants.catalogue import MUTANTS, VARIANT_ROWS
from shardproof.suites.mutants.draws import showing
from shardproof.suites.mutants.field import FIELD
from shardproof.suites.mutants.mutant import Mutant

_TRIES = 4
"""Cases in which a wrong tensor is looked for: the smallest two that are drawn of each mode, until there are these."""


def scripts(name: str, *, field: bool = False) -> Iterator[tuple[str, str, str]]:
    """(name, text of the script, "") of this bug, or of "all" that are not held back; without text, why there is none.

    With `field` of those of public issues. Raises RequestError for a name that no open mutant or variant has.
    """
    known = {row.name: row for row in (FIELD if field else (*MUTANTS, *VARIANT_ROWS))}
    if name != "all" and name not in known:
        near = difflib.get_close_matches(name, known, 5, 0.0)
        which = "is no open mutant or variant" + (" of a public issue" if field else "")
        raise RequestError(f"emit-repro={name}: {which}; legal: all {' '.join(near)} ...")
    return _scripts(list(known.values()) if name == "all" else [known[name]])


def _scripts(rows: list[Mutant]) -> Iterator[tuple[str, str, str]]:
    with engine_named("inproc") as engine:
        for row in rows:
            text, why = "", row.equivalent or "the dense model has it too" * row.is_shared
            if not why:
                try:
                    text = _script(row, engine)
                except MachineError as error:  # one that takes too long does not cost the others theirs
                    why = error.cause
            yield row.name, text, "" if text else why or "no returned tensor is wrong in small cases"


def _script(row: Mutant, engine: Engine) -> str:
    """The script of the first drawn case that fails, "" when none shows a wrong tensor."""
    sources = row.sources()
    cases = (case for mode in row.modes for case in showing(row, mode)[:2])
    with row.subject() as subject:
        given = NamedSubject(name=SUBJECT, call=named(subject).call, address=SUBJECT if subject == SUBJECT else "")
        for case in itertools.islice(cases, _TRIES):
            if text := emit(case, given, engine, planted=sources):
                return text.replace('"""', f'"""{row.name}: {row.stands_for}\n\n{_diff(sources)}\n', 1)
    return ""


def _diff(sources: Mapping[str, str]) -> str:
    """The changes as a patch, for the docstring of a script."""
    lines: list[str] = []
    for module, text in sources.items():
        path = f"{module.replace('.', '/')}.py"
        lines += difflib.unified_diff(source_of(module).splitlines(), text.splitlines(), path, path, "", "", 1, "")
    return "\n".join(lines).replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
