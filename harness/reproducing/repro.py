"""A failure as a stand-alone script: the case shrunk, one tensor of its truth inside, plain torch and gloo around it.

    text = emit(case, "my.module:subject", engine)     # None when nothing fails, or nothing that a script can show

The script imports the subject and nothing of this package, unless the subject is a part of it. A script shows one
returned tensor that is wrong, ranks that disagree on it, or a subject that raises. A ledger that parts from its
expectation, an activation that only the harness captures, or a race, is nothing that it can see.
"""

import ast
import base64
import inspect
import pprint
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardproof.harness.checking.checks import CHECKS
from shardproof.harness.checking.measures.distance import TruthTensor
from shardproof.harness.checking.measures.kinds import NUMERIC_KINDS, kind_of
from shardproof.harness.checking.measures.tolerance import least_rms, own_share
from shardproof.harness.checking.measuring import compare_with_truth, sizes_of
from shardproof.harness.checking.records import Evidence, RecordedRun, Truth
from shardproof.harness.diagnosing.causes.places import order_by_time
from shardproof.harness.diagnosing.explained import repeat_command
from shardproof.harness.engines.engine import Engine
from shardproof.harness.errors import MachineError, ProgramError
from shardproof.harness.plain_case import PlainCase
from shardproof.harness.protocols import CaseLike, Subject, case_text, without_saving
from shardproof.harness.reproducing import repro_script
from shardproof.harness.running.proof import prove
from shardproof.harness.running.result import CaseResult
from shardproof.harness.running.trials.runs import judge_case, record_case
from shardproof.harness.running.trials.trial import Trial, reference_of
from shardproof.harness.subject import NamedSubject, refusal, resolve_subject

LARGEST = 2**14
"""The most elements of a truth that a script carries; of several wrong tensors the first that is small enough, else the
smallest.
"""
OWN = ("shardproof.parallel.", "shardproof.suites.")
"""Packages whose subjects belong to this package: their scripts may import its case."""
SMALLER: tuple[Mapping[str, int], ...] = (
    {"dp": 1},
    {"tp": 2, "wp": 2},
    {"tp": 2},
    {"steps": 1},
    {"micro": 1},
    {"layers": 1},
    {"batch": 1},
    {"seq": 8},
    {"vocab": 264},
    {"heads": 4, "kv_heads": 2, "hidden": 16, "ffn": 32},
)
"""Changes that are tried on a failing case, one after another, the mesh first."""


_FACTS = "\n\nFACTS = "
_MAIN = '\n\nif __name__ == "__main__":\n    sys.exit(main(FACTS))\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallestFailure:
    """The smallest failing case that was found, and how it fails: the name of a returned tensor, "" if the subject
    raises.
    """

    result: CaseResult
    name: str


def emit(
    case: CaseLike,
    subject: str | NamedSubject,
    engine: Engine,
    when: str = "",
    planted: Mapping[str, str] | None = None,
) -> str | None:
    """The script of the smallest failing case found from this one; None if a script cannot show the failure.

    `when`: the words of the case that its failure needs, as its line `when:` has them. `planted`: module -> changed
    source, with which the subject was imported and the script imports it. Raises RequestError if there is no such
    subject.
    """
    given = resolve_subject(subject)
    failure = shrink_failure(case, given, engine)
    return None if failure is None else _render_script(failure, given.name, when, planted or {})


def shown_name(script: str) -> str:
    """The name of the tensor that a script shows, "" if it shows how the subject ends."""
    return str(ast.literal_eval(script.partition(_FACTS)[2].partition(_MAIN)[0])["name"])


def shrink_failure(case: CaseLike, given: Subject | NamedSubject, engine: Engine) -> SmallestFailure | None:
    """Make a failing case smaller as long as a tensor of the same kind (or the run) fails; None if it does not fail.

    The last case is proved in full, so that its causes can be reported.
    """
    subject = resolve_subject(given)
    name = _find_failing_tensor(case, subject, engine)
    if name is None:
        return None
    for words in SMALLER:
        if any(getattr(case, word, size) > size for word, size in words.items()):
            with suppress(ValueError):  # an illegal combination of sizes: the case keeps its own
                smaller = case.but(**words, **without_saving(case))
                found = _find_failing_tensor(smaller, subject, engine)
                if found is not None and kind_of(found) == kind_of(name):
                    case, name = smaller, found
    return SmallestFailure(result=prove(case, subject, engine), name=name)


def _find_failing_tensor(case: CaseLike, subject: NamedSubject, engine: Engine) -> str | None:
    """The returned tensor that fails in one run of the case, "" if the subject raises; None if nothing fails."""
    if refusal(case, subject):
        return None
    trial = Trial(case=case, subject=subject, engine=engine, reference=reference_of(subject, engine))
    try:
        evidence = record_case(trial)
    except ProgramError:
        return ""
    except MachineError:
        return None
    evidence, _ = judge_case(trial, evidence, {name: CHECKS[name] for name in NUMERIC_KINDS})
    shown = [name for name in _wrong_names(evidence.run, evidence.truth) if name in evidence.truth.tensors]
    if not shown:
        return None
    small = [name for name in shown if evidence.truth.tensors[name].numel() <= LARGEST]
    return small[0] if small else min(shown, key=lambda name: evidence.truth.tensors[name].numel())


def _wrong_names(run: RecordedRun, truth: Truth) -> list[str]:
    """Returned names that are wrong or on which ranks disagree, in the order of training."""
    returned = {name for outcome in run.outcomes for name in outcome}
    torn = {flaw.name for flaw in run.merged.flaws}
    known = order_by_time([name for name in truth.tensors if name in returned], run.case.steps)
    rms = sizes_of(run, truth)
    return [
        name
        for name in known
        if name in torn or not compare_with_truth(run, truth, name, rms.get(kind_of(name), 0.0)).right
    ]


def _render_script(failure: SmallestFailure, subject: str, when: str, planted: Mapping[str, str]) -> str:
    """The text of the script: its docstring, the body, the facts."""
    case = failure.result.case
    own = subject.startswith(OWN) and not isinstance(case, PlainCase)
    facts: dict[str, Any] = {
        "subject": subject,
        "case_text": case_text(case) if own else "",
        "case": {} if own else _plain_attributes(case),
        "world_size": case.world_size,
        "seed": case.seed,
        "name": failure.name,
        "shape": (),
        "measure": "run",
        "allowed": 0.0,
        "own": 0.0,
        "scale": 1.0,
        "truth": "",
        "planted": {module: _pack_data(source.encode()) for module, source in planted.items()},
    }
    if failure.name and failure.result.evidence is not None:
        facts |= _numbers_of_tensor(failure.result.evidence, failure.name)
    source = inspect.getsource(repro_script)
    body = source[source.index("\nimport ") + 1 :]
    written = pprint.pformat(facts, width=116, sort_dicts=False)
    return f"{_render_header(failure, subject, when, planted)}\n{body}{_FACTS}{written}{_MAIN}"


def _numbers_of_tensor(evidence: Evidence, name: str) -> dict[str, Any]:
    """The truth of one tensor, and how far a right one may be from it."""
    truth: Tensor = evidence.truth.tensors[name].double().contiguous()
    true, kind = TruthTensor.of(truth), sizes_of(evidence.run, evidence.truth).get(kind_of(name), 0.0)
    # a tensor that did not merge is replaced by its truth, since only the limits are needed
    tensors = {name: evidence.truth.tensors[name], **evidence.run.tensors}
    limits = compare_with_truth(evidence.run.with_tensors(tensors), evidence.truth, name, kind)
    return {
        "shape": tuple(truth.shape),
        "measure": limits.measure,
        "allowed": limits.allowed,
        "own": own_share(str(evidence.run.case.dtype)),
        "scale": max(true.rms, least_rms(true, kind)),
        "truth": _pack_data(truth.numpy().tobytes()),
    }


def _pack_data(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode()


def _plain_attributes(case: CaseLike) -> dict[str, Any]:
    """The public attributes of the case that are plain data: its words and what follows from them."""
    own = case.words() if isinstance(case, PlainCase) else {}
    found = {name: getattr(case, name) for name in dir(case) if not name.startswith("_")}
    return {name: value for name, value in {**found, **own}.items() if _is_data(value)}


def _is_data(value: object) -> bool:
    """Whether a Python literal can express this value."""
    if isinstance(value, Mapping):
        return all(_is_data(part) for item in value.items() for part in item)
    if isinstance(value, tuple | list):
        return all(map(_is_data, value))
    return value is None or type(value) in (int, float, bool, str)


def _render_header(failure: SmallestFailure, subject: str, when: str, planted: Mapping[str, str]) -> str:
    result = failure.result
    diagnosis = result.diagnosis
    causes = "; ".join(cause.words for cause in diagnosis.causes) if diagnosis else ""
    found = "Right without the planted bug" if planted else "Found by shardproof; the whole of it"
    shown = f"{failure.name} is wrong" if failure.name else "the subject does not finish"
    return f'''"""{shown} when {subject} runs {result.text}

    python FILE                             starts {result.case.world_size} ranks on gloo and the CPU
    torchrun --nproc-per-node {result.case.world_size} FILE     the same, started by torchrun

Run it where the module of the subject can be imported. Exit status: 1 reproduced, 0 not, 2 nothing can be said.
Likely causes: {causes or "none known"}.{f"{chr(10)}When: {when}." if when else ""}
{found}: {repeat_command(result.case, subject)}

What it cannot show: calls that are right in number and wrong in kind, races, and whatever gloo does not do (AVG).
"""
'''
