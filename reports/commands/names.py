"""`shardproof names`: the names, shapes and dtypes of a case's truth, by kind, in the order of computation.

They come from the outcome of the truth for this case, so the truth is computed once. Values that ranks draw and pass to
the truth (random=stateful, init=shard) are taken from the field here, with the same names and shapes.
"""

import argparse
import sys
from collections.abc import Mapping

from torch import Tensor

from shardproof.harness.diagnosing.causes.places import order_by_time
from shardproof.harness.ledger import shape_text
from shardproof.harness.outcome.blocks import dtype_word
from shardproof.harness.protocols import CaseLike
from shardproof.harness.running.engines import engine_named
from shardproof.harness.running.ranks.capacity import admit
from shardproof.harness.running.trials.trial import Trial, reference_of
from shardproof.harness.subject import NamedSubject, case_of, compared_with, resolve_subject, truth_of
from shardproof.reports.printing.text import show_table, show_words
from shardproof.reports.printing.text_tables import Table

KINDS: Mapping[str, str] = {
    "init": "initial values of parameters",
    "mask": "what dropout keeps, bool [samples of a step, shape of a sample] by step and site",
    "act": "outputs of modules in the first micro-batch: captured by module name, nothing to return",
    "logits": "[rows of all data ranks and micro-batches, sequence, vocabulary]",
    "loss": "loss of a step: its sum over all tokens that count, divided by their number",
    "act_grad": "gradients of the outputs of modules: captured by module name, nothing to return",
    "grad": "gradients of step 0, after all synchronisation and before clipping",
    "tokens": "number of tokens that a step counts",
    "grad_norm": "norm of all gradients of a step, before clipping",
    "metric": "counts of the metric",
    "param_after": "parameters after a step; with the optimizer's moments each step is compared by itself",
    "exp_avg_after": "Adam's first moments after a step",
    "exp_avg_sq_after": "Adam's second moments after a step",
    "param": "parameters after the last step",
    "saved": "what the files of a checkpoint hold (save=): parameters, moments and counts after the last step",
}
"""Kind of an outcome name -> what its tensors are."""
OWN = "a kind of this truth's own, compared as it is"
RULE = (
    "Each kind is optional as a whole, and one at least must be returned. Of a kind that is returned all names must "
    "be, or subject.unchecked declares those that are left out. Shapes are those of the full tensors."
)


def main(arguments: argparse.Namespace) -> int:
    """Print the names of the truth of a case. Exit status 0; raises RequestError if it cannot be computed."""
    subject = resolve_subject(arguments.subject, arguments.truth or "")
    case = case_of(" ".join(arguments.case), subject)
    admit((case,), "inproc")
    found = tables_of_names(names_of_truth(case, subject))
    show_words(f"{subject.name} is compared with {compared_with(truth_of(subject))}.\n{RULE}\n", sys.stdout)
    for one in found:
        show_table(one, sys.stdout)
    return 0


def names_of_truth(case: CaseLike, subject: NamedSubject) -> Mapping[str, Tensor]:
    """The outcome of the truth of this subject, in the order of training.

    Raises RequestError if the truth cannot be computed.
    """
    with engine_named("inproc") as engine:
        reference = reference_of(subject, engine)
        if reference.model:
            case = reference.model.self_contained(case)
        trial = Trial(case=case, subject=subject, engine=engine, reference=reference)
        truth = trial.true()
    return {name: truth[name] for name in order_by_time(list(truth), case.steps)}


def tables_of_names(truth: Mapping[str, Tensor]) -> list[Table]:
    """Tables by kind. Names that differ only in the step share a row, with the first and the last of them."""
    rows: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for name, tensor in truth.items():
        kind, *path = name.split("/")
        step = bool(path) and path[0].isdigit()
        place = ("/".join(path[step:]), shape_text((tuple(tensor.shape),)), dtype_word(tensor.dtype))
        rows.setdefault(kind, {}).setdefault((*place, "" if step else name), []).append(name)
    return [
        Table(
            title=f"{kind}: {KINDS.get(kind, OWN)}",
            headers=("name", "shape", "dtype"),
            rows=tuple(
                (" .. ".join(dict.fromkeys((alike[0], alike[-1]))), shape or "scalar", dtype)
                for (_, shape, dtype, _), alike in of_kind.items()
            ),
        )
        for kind, of_kind in rows.items()
    ]
