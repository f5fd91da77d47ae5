"""What two launches of one program show: id -> sentence (`rendering` says what a template may hold)."""

from collections.abc import Callable, Mapping, Sequence

from shardproof.harness.errors import name_ranks, ranks_text
from shardproof.harness.verdicts.sentences.formats import join_names


def _rows_differ(
    step: int,
    samples: int,
    shared: Sequence[int],
    missing: Sequence[Sequence[int]],
    twice: Sequence[Sequence[int]],
    twice_on: Sequence[int],
    foreign: Sequence[Sequence[int]],
) -> str:
    parts = []
    if shared:
        parts.append(f"ranks {ranks_text(shared)} read the same batch, as if they were one data rank")
    if missing:
        rows = f"{len(missing)} of launch A's {samples} samples {_verb(missing)}"
        parts.append(f"{rows} read by no rank, e.g. {_row(missing)}")
    if twice:
        parts.append(f"{len(twice)} {_verb(twice)} read more than once, e.g. {_row(twice)}, by {name_ranks(twice_on)}")
    if foreign:
        rows = f"{len(foreign)} {_verb(foreign)} read that launch A does not have in this step"
        parts.append(f"{rows}, e.g. {_row(foreign)} on rank {foreign[0][2]}")
    return f"step {step}: {'; '.join(parts)}"


def _verb(rows: Sequence[object]) -> str:
    return "are" if len(rows) > 1 else "is"


def _row(rows: Sequence[Sequence[int]]) -> str:
    return f"row {rows[0][1]} of micro-batch {rows[0][0]}"


def _without_partner(names: Sequence[str]) -> str:
    return f"{join_names(names)} of launch A {'have' if len(names) > 1 else 'has'} no partner"


def _other_begin(names: Sequence[str], parameters: int, ranks: Sequence[int]) -> str:
    words = f"{len(names)} of {parameters} parameters begin with other values than in launch A, first {names[0]}"
    alone = f"; on {name_ranks(ranks)} alone, as where every rank has a seed of its own" if ranks else ""
    return f"{words}{alone}; legal: one seed for both launches, or --same-init"


FROM_LAUNCHES: Mapping[str, str | Callable[..., str]] = {
    # samples
    "no_samples": "samples cannot be compared: {why:fact}",
    "data_ranks_alike": "ranks {ranks:ranks} share a data axis ({axis}), were given the same batch and compute the "
    "same from it",
    "no_whole_step": "no step was recorded whole",
    "samples_left_out": "they are left out by the budget; legal: a larger --budget",
    "unknown_samples": "which samples each rank has read is not known",
    "nothing_received": "the first modules receive nothing that is recorded",
    "no_rows_alike": "what the first modules are called with has no rows alike: {mine:all} in launch A, "
    "{theirs:all} in launch B",
    "other_rows": "the launches do not train on the same samples: {how:fact}",
    "rows_differ": _rows_differ,
    "rows_read_once": lambda rows, steps, in_order: (
        f"{rows} samples of {steps} step{'s' * (steps > 1)} are read once each, in "
        f"{'the order of launch A' if in_order else 'another order'}"
    ),
    # whether anything is trained
    "launch_dead": "launch {launch} is dead, so that its parity would prove nothing: {how:fact}",
    "launch_without": "of launch {launch} no {missing:all} was recorded",
    "launch_alive": "losses are numbers, gradients reach parameters, and parameters move",
    "loss_zero": "its loss is 0 in step {step} on every rank, as where a mask leaves nothing",
    "weights_no_number": "its gradient of {name} is no number in step {step}, nor are its weights after it",
    "loss_no_number": "its loss is no number in step {step}, as the mean over no target is",
    "no_gradient": "no gradient reaches a parameter in step {step}: its loss does not depend on them",
    "gradients_zero": "every gradient is zero throughout in step {step}",
    "nothing_moves": "no parameter moves in {steps} {steps:step|steps}",
    "targets_ignored": "every target is ignored ({name} is {value} throughout) in step {step}",
    # partners
    "partners": "{placed} of {parameters} parameters of launch A have a partner",
    "loss_reading": "a step's loss is the {calls} over a rank's micro-batches, the {ranks} over data ranks",
    "nothing_common": "the launches have no parameter in common",
    "without_partner": _without_partner,
    "partner_of_none": "{names:list} of launch B: none of launch A's parameters, or more than one, has its shape and "
    "numbers",
    "second_without": "launch B recorded no {names:list}",
    "silent_ranks": lambda ranks: f"{name_ranks(ranks)} of launch B recorded nothing",
    "recorder_failed": "the recorder of rank {rank} of launch {launch} failed: {problem}",
    "no_full_tensor": "{names:list} of launch A's ranks make no full tensor",
    # what cannot be judged
    "launch_repeats": lambda tensors: (
        f"two runs of launch A {f'differ by rounding in {tensors} tensors' if tensors else 'agree in every bit'}"
    ),
    "launch_differs": "two runs of launch A differ in {names:list}: what differs between two runs of one "
    "launch cannot be judged; legal: a seed for all that it draws",
    "launch_samples": "two runs of launch A do not read the same samples ({how:fact}), so nothing can be "
    "judged; legal: a seed for all that it draws",
    "proves_nothing": "this proves nothing: {why:fact}",
    "runs_apart": "two runs of launch A differ too",
    "no_same_init": "{name} did not get launch A's initial value: {why}",
    "own_number": "its stage numbers its layers by itself, and it is {name} of launch A; legal: shardproof parity "
    "--same-init, which launches B twice",
    "numbers_drawn": "numbers are drawn in {names:list}, others on each launch; legal: --no-dropout",
    "rounding_unknown": "no run of launch A with its rounding moved says whether rounding is behind it; legal: "
    "--control FOLDER (record --values --perturb 1), or --dtype float64",
    # causes
    "rows_of_own_order": lambda ranks, others: (
        f"{name_ranks(ranks)} alone {'reads' if len(ranks) == 1 else 'read'} rows that launch A does not have in this "
        f"step, {name_ranks(others)} none, as where every rank shuffles with a seed of its own"
    ),
    "drawn_in_b_alone": lambda names, ranks: (
        f"random numbers are drawn in {join_names(names)} on {name_ranks(ranks)} of launch B, and nowhere in launch A"
    ),
    "other_buffers": lambda name, ranks: (
        f"the buffer {name} begins with other values than in launch A on {name_ranks(ranks)}"
    ),
    "begun_twice": lambda names, other, rank, held: (
        f"no rank begins with {join_names(names)} of launch A, and {other} begins at two places: rank {rank} "
        f"has it as {held}"
    ),
    "other_begin": _other_begin,
    "gradients_kept": "they hold the gradients of step {step} too, as where nothing sets them to zero",
}
