"""The first place where it went wrong: phase, module and step, from wrong tensors and from the ledger.

The kind of the first wrong name in the order of training (`causes.places.order_by_time`) gives the place:

    act/M          the forward of module M, whose inputs came earlier and are right; in the first micro-batch of step
                   0, or in the one whose activations were captured (`Search.observed`)
    logits/s       the forward of step s, in another micro-batch than the captured one
    loss/s         the computation of the loss from the logits
    act_grad/M     the backward of the module that uses the output of M
    grad/p         grad_sync if backward left the gradient right, backward if it left it wrong, or as parts of a sum
                   that the expectation has nowhere behind backward. If neither is known:
                   grad_sync if all gradients are wrong, or those of several modules but none that is sharded, or if
                   replicas of p differ; otherwise backward. The module is that of the first wrong gradient
    tokens/s, grad_norm/s
                   the sums over ranks between the last backward and the optimizer's step
    param/p        the optimizer's step; likewise states after a step (param_after/s/p, exp_avg_after/s/p). The module
                   is that of the first wrong one, or none if all are wrong

If step s - 1 is right and step s begins wrong, the update of step s - 1 is the place, unless the parameters after it
are known to be right: as returned, or in a run of the same case that ended there (`Search.earlier`).

A call that differs from the expectation in the same or an earlier phase is named instead of a tensor, because it is
exact. Two facts are added to a place: the coordinates of the wrong ranks on the mesh ("wrong on cp rank 1 alone, right
on cp rank 0"), and for code outside of any module the modules around it ("between wqkv and wo: the attention core").
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from shardproof.harness.checking.call_checks import find_strays
from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.laws import Broken
from shardproof.harness.checking.ledger_checks import module_order
from shardproof.harness.checking.measures.kinds import is_state, kind_of, step_of
from shardproof.harness.checking.records import Calls, Evidence, RecordedRun, Truth
from shardproof.harness.diagnosing.causes.before_sums import find_summed_axes, is_left_wrong, is_sum_due
from shardproof.harness.diagnosing.causes.places import held_whole, place_of, update_in_doubt
from shardproof.harness.diagnosing.coordinates import ranks_in_words
from shardproof.harness.diagnosing.hypotheses.masks import find_stray_holders
from shardproof.harness.differences import Difference
from shardproof.harness.engines.engine import Unwaited
from shardproof.harness.ledger import Event, order_of_phase
from shardproof.harness.verdicts.facts import First, state_difference

_NUMBER = re.compile(r"\d+")


def first_place(
    evidence: Evidence, wrong: Sequence[str], parted: Difference | None, law: Broken | None = None
) -> First:
    """The first place of these wrong names (in training order) and this first difference of the ledger.

    `law` is the first general law that the calls broke, if there is no expectation.
    """
    event = state_difference(parted).text + (f" at {parted.caller}" if parted.caller else "") if parted else ""
    shown = _shown_by(evidence, wrong) if wrong else None
    if parted and (shown is None or _call_comes_first(evidence, parted, shown)):
        name, phase, region = wrong[0] if wrong else "", _issued_in(parted), parted.line.region
        if phase == "grad_sync" and not region and kind_of(name) == "grad":
            # A sum over ranks is in no module, so the module is that of the gradient.
            region = _owner_of_gradient(evidence.run, evidence.truth, [name])
        return First(phase=phase, region=region, name=name, event=event)
    if (stray := next(iter(find_strays(evidence.run.calls, evidence.claims)), None)) and (
        shown is None or order_of_phase(stray.phase) <= order_of_phase(shown.phase)
    ):
        call = f"{stray.op} named {stray.axis} over the ranks {sorted(stray.group)} at {stray.caller}"
        return First(
            phase=stray.phase, region=stray.region, step=stray.step, name=wrong[0] if wrong else "", event=call
        )
    if law is not None:
        event = law.fact.text
        summed = shown is not None and shown.name.startswith("grad/")  # compared after grad_sync
        if shown is None or (
            not shown.note and order_of_phase(law.phase) <= order_of_phase("grad_sync" if summed else shown.phase)
        ):
            return First(phase=law.phase, region=law.region, name=wrong[0] if wrong else "", event=event)
    if shown is not None:
        return replace(shown, event=event)
    for work in evidence.run.calls.unwaited:
        if found := _issued_as(evidence.run.calls, work):
            call = f"{work.op} #{work.number} of {work.group} at {work.caller}, never waited for"
            return First(phase=found.phase, region=found.region, step=found.step, event=call)
    return First()


def _issued_as(calls: Calls, work: Unwaited) -> Event | None:
    """The event of a work: by its number among the calls of its rank and group, else the first from the same line."""
    alike = [event for event in calls.events if event.rank == work.rank and event.op not in ("send", "recv")]
    of_group = [event for event in alike if event.axis == work.group.partition(" ")[0]]
    numbered = of_group[work.number : work.number + 1] if work.number >= 0 else []
    from_there = [event for event in alike if event.caller and work.caller.startswith(event.caller)]
    found = [event for event in (*numbered, *from_there) if event.op == work.op and event.is_async]
    return found[0] if found else None


def _issued_in(parted: Difference) -> str:
    """The phase of a differing call; "step" for a call of grad_sync in data, which came after the last step."""
    if parted.expected and parted.found and (parted.expected.phase, parted.found.phase) == ("grad_sync", "data"):
        return "step"
    return parted.line.phase


def _call_comes_first(evidence: Evidence, parted: Difference, shown: First) -> bool:
    """Whether the difference of the ledger comes before the first wrong tensor, or at the same place."""
    if shown.step:  # the ledger counts whole runs, so the call may be one of step 0
        return True
    call, tensor = order_of_phase(_issued_in(parted)), order_of_phase(shown.phase)
    if call != tensor or parted.line.phase not in ("forward", "backward"):
        # A parameter gradient is compared after grad_sync, so a call up to grad_sync comes before it.
        return call <= (order_of_phase("grad_sync") if shown.name.startswith("grad/") else tensor)
    modules = module_order(evidence.run.calls, evidence.claims, evidence.truth)
    order = {module: place for place, module in enumerate(modules)}
    mine, theirs = (order.get(region, len(order)) for region in (parted.line.region, shown.region))
    if shown.name.startswith("grad/"):
        return True
    return mine <= theirs if parted.line.phase == "forward" else mine >= theirs


def _shown_by(evidence: Evidence, wrong: Sequence[str]) -> First:
    """The place of the first wrong tensor."""
    name = wrong[0]
    if (found := evidence.search.located) is not None:
        return First(phase=found.phase, region=found.module, step=0, name=name, note=found.words)
    place, kind = place_of(name, evidence.run.case.steps), kind_of(name)
    phase, region, step = place.phase, place.module, place.step
    if start := _module_of_other_start(evidence, phase, region, step):
        return First(phase="forward", region=start, step=step, name=name)
    ended: tuple[str, ...] = ()
    if (update := update_in_doubt(evidence.run, evidence.truth, name, wrong)) >= 0:
        earlier = evidence.search.earlier
        if earlier is not None and has_right_parameters(earlier[0].run, earlier[1]):
            ended = (f"parameters are right where the case ends before that step (steps={update + 1})",)
        elif kind != "param" and not is_state(name):
            phase, region, step = "step", "", update
    elif kind in ("act", "act_grad"):
        step, micro = evidence.search.observed
        region = region if kind == "act" else _user_of(evidence.truth, region)
        ended = (f"in micro-batch {micro}",) if (step, micro) != (0, 0) else ()
    elif kind == "grad":
        phase, region, left = _gradient_place(evidence, wrong)
        ended = (left,) if left else ()
    elif kind == "mask" and (strays := find_stray_holders(evidence.run, name)):
        region = _first_module_of(evidence, strays[0], name) or region
    if kind == "param" or is_state(name):
        others = {_NUMBER.sub("", place_of(other, 1).module) for other in wrong}
        # One module in several layers counts as one. The first of several is named if this step updates others right.
        compared = evidence.run.tensors.keys() & evidence.truth.tensors.keys()
        updated = {other for other in compared if (kind_of(other), step_of(other)) == (kind, step_of(name))}
        region = region if len(others) == 1 or not updated <= {*wrong} else ""
    beside = (ranks_in_words(evidence, name), name_surrounding_modules(evidence.run, evidence.truth, name, wrong))
    return First(phase=phase, region=region, step=step, name=name, beside=(*filter(None, beside), *ended))


def _module_of_other_start(evidence: Evidence, phase: str, region: str, step: int) -> str:
    """The module of a parameter that a rank begins with other values than the truth, if a loss or an output of the
    first step is all that shows it; else "".
    """
    start, samples = evidence.search.other_start, evidence.search.other_samples
    if start is None or samples is not None or region or step or phase not in ("forward", "loss"):
        return ""
    # Of two launches the fact has no name: their initial values are tensors of their own, with their own places.
    return str(start.values.get("name", "")).rpartition(".")[0]


def _first_module_of(evidence: Evidence, rank: int, mask: str) -> str:
    """The first module that a rank computes, if this mask is the first that it drew; else ""."""
    outcome = evidence.run.full_outcomes[rank]
    drawn = next(name for name in outcome if kind_of(name) == "mask")
    modules = [name.removeprefix("act/") for name in outcome if kind_of(name) == "act"]
    order = [name.removeprefix("act/") for name in evidence.truth.tensors if kind_of(name) == "act"] or modules
    leaves = (m for m in order if m in modules and not any(other.startswith(f"{m}.") for other in modules))
    return next(leaves, "") if drawn == mask else ""


def has_right_parameters(run: RecordedRun, findings: Mapping[str, Finding]) -> bool:
    """Whether a passing run has surely right parameters, since no wide limit may hide a wrong step."""
    decided, of = findings["update"].decided.get("param", (0, 0)) if "update" in findings else (0, 0)
    return 0 < decided == of and not run.lower.names and run.dtype in ("float64", "float32")


def _user_of(truth: Truth, module: str) -> str:
    """The module whose backward computes the gradient of the output of `module`.

    It is the next module in the same parent, or else the next one at all; for the last one it is that module. Code
    between two siblings, as after a block (a residual sum) or between two matrices, belongs to their parent.
    """
    order = [name.removeprefix("act/") for name in truth.tensors if name.startswith("act/")]
    if module not in order:
        return module
    later = order[order.index(module) + 1 :]
    if not later:
        return module
    following, around = later[0], module.rpartition(".")[0]
    siblings = following.rpartition(".")[0] == around and around in order
    is_block = any(name.startswith(f"{module}.") for name in order)
    is_weighted = f"grad/{module}.weight" in truth.tensors and f"grad/{following}.weight" in truth.tensors
    outputs = [truth.tensors[f"act/{name}"].numel() for name in (module, following)]
    in_parts = is_weighted and outputs[1] < outputs[0] and not are_matrices(truth, following)
    has_code = is_block or in_parts or (is_weighted and are_matrices(truth, module, following))
    return around if siblings and has_code else following


def _gradient_place(evidence: Evidence, wrong: Sequence[str]) -> tuple[str, str, str]:
    """Phase and module of wrong parameter gradients whose activation gradients are all right, and a sentence.

    The sentence is "" unless backward left the first gradient right, so that what follows is wrong.
    """
    run, truth = evidence.run, evidence.truth
    bad = [name for name in wrong if kind_of(name) == "grad"]
    owner = _owner_of_gradient(run, truth, bad)
    if (axes := find_summed_axes(evidence, bad[0], bad)) is not None:
        summed = f"as backward leaves it, its sum over {' and '.join(axes)} is right"
        phase = "backward" if axes and not is_sum_due(evidence, bad[0], axes) else "grad_sync"
        return phase, owner, summed if axes else "as backward leaves it, it is right"
    if is_left_wrong(evidence, bad[0]):
        return "backward", owner, ""
    known = [name for name in run.returned if kind_of(name) == "grad"]
    whole = {name for name in known if held_whole(run, name)}
    torn = {flaw.name for flaw in run.merged.flaws if flaw.kind == "replica conflict"}
    synced_alike = set(bad) <= whole < set(known) and (len({place_of(name, 1).module for name in bad}) > 1)
    synced = len(bad) == len(known) > 1 or synced_alike or bad[0] in torn
    return "grad_sync" if synced else "backward", owner, ""


def _owner_of_gradient(run: RecordedRun, truth: Truth, bad: Sequence[str]) -> str:
    """The module that computes the first of these gradients, in the order of backward.

    A last module without parameters may use the table of the first one, as a head tied to the embedding does. Then the
    gradient is wrong in every row, since looking up tokens reaches only some rows.
    """
    modules = [name.removeprefix("act/") for name in truth.tensors if name.startswith("act/")]
    leaves = [module for module in modules if not any(other.startswith(f"{module}.") for other in modules)]
    borrowers = [leaf for leaf in leaves if not any(name.startswith(f"grad/{leaf}.") for name in truth.tensors)]
    lent = [
        name
        for name in bad
        if borrowers
        and name.startswith(f"grad/{leaves[0]}.")
        and truth.tensors[name].shape[:1] == truth.tensors[f"act/{borrowers[-1]}"].shape[-1:]
        and _is_wrong_everywhere(run, truth, name)
    ]
    if lent:
        return borrowers[-1]
    return place_of(bad[0], 1).module


def _is_wrong_everywhere(run: RecordedRun, truth: Truth, name: str) -> bool:
    """Whether every row of this gradient is wrong."""
    value, true = run.tensors.get(name), truth.tensors[name]
    if value is None or true.dim() < 2:
        return False
    wrong = (value.double() - true.double()).abs() > 1e-6 * true.double().abs().max()
    return bool(wrong.flatten(1).any(1).all())


_CORES: Mapping[str, str] = {"attention": "the attention core", "mlp": "the activation function"}
"""Last word of a module -> what its own code computes between two linears."""


def name_surrounding_modules(run: RecordedRun, truth: Truth, name: str, wrong: Collection[str]) -> str:
    """The two modules around the unnamed code that computes the first wrong activation, or gradient of an activation.

    The value of the first module is right and that of the second is wrong. "" if a module computes the wrong value.
    """
    kind, _, module = name.partition("/")
    order = [other.partition("/")[2] for other in truth.tensors if kind_of(other) == "act"]
    around = module.rpartition(".")[0]
    line = [other for other in order if other.rpartition(".")[0] == around]
    if kind not in ("act", "act_grad") or not around or module not in line[1 if kind == "act" else 0 :]:
        return ""
    last, at = line[-1], line.index(module)  # modules before the last one may be parallel branches
    one, itself, passed = (line[at - 1], module, line[:at]) if kind == "act" else (last, last, line[at + 1 :])
    values = run.tensors
    right = all(f"{kind}/{other}" in values and f"{kind}/{other}" not in wrong for other in passed)
    if not passed or not right or (kind == "act" and module != last) or not are_matrices(truth, module, last):
        return ""
    core = _CORES.get(around.rpartition(".")[2], "code of its own")
    one, module, itself = (name.rpartition(".")[2] for name in (one, module, itself))
    return f"between {one}, which is right, and {module} of {around}: {core}, or {itself} itself"


def are_matrices(truth: Truth, *modules: str) -> bool:
    """Whether each of these modules has a matrix as its weight, as a linear has."""
    weights = (truth.tensors.get(f"grad/{module}.weight") for module in modules)
    return all(weight is not None and weight.dim() > 1 for weight in weights)
