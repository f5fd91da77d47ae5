"""The sentences of causes: id -> template (`rendering` says what a template may hold)."""

from collections.abc import Callable, Mapping, Sequence

from shardproof.harness.errors import name_ranks, ranks_text
from shardproof.harness.verdicts.sentences.formats import describe_factor

_ALL_RANKS = "all ranks"
_SHOWN = 3
"""The most names that a cause lists."""
_WHAT = {
    "it": "it is {} the truth",
    "all": "all are {} the truth",
    "it and gradients": "it and all wrong gradients are {} the truth",
    "gradients": "the gradients of step {step} are {} the right ones",
    "updates": "the updates of step {step} are {} the right ones",
}
"""What a factor multiplies, in words."""
_POWERS = {1: "{}", -1: "1 / {}", 2: "the square of {}", -2: "1 / the square of {}"}
"""Powers of a size that a factor may be, in words."""
_SIZES = {
    "micro": "the number of micro-batches",
    "all ranks": "the number of ranks",
    "tokens of the step": "the number of tokens of the step",
}
"""Sizes that are not those of an axis, in words."""
_WHO = {
    "recorder": "the recorder",
    "torch": "the torch profiler",
    "nsys": "Nsight Systems",
    "closed_form": "the closed form",
}


def _factor(
    what: str,
    factor: float,
    step: int = -1,
    sizes: Sequence[tuple[str, int]] = (),
    elsewhere: Sequence[tuple[float, str]] = (),
    unsure: bool = False,
) -> str:
    """A factor, the sizes of the case whose power it is, and what it is in cases of other sizes."""
    number = describe_factor(factor)
    relation = _WHAT[what].format(number, step=step)
    names = ((size.partition("=")[0], power) for size, power in sizes)
    powers = (_POWERS[power].format(_SIZES.get(name, f"the size of {name}")) for name, power in names)
    which = " or ".join(dict.fromkeys(powers))
    others = ", ".join(f"{there:.4g} where {label}" for there, label in elsewhere)
    shown = "a constant factor would look the same" if unsure else others
    return relation + (f"; {number.removesuffix(' x')} is {which}" if which else "") + (f" ({shown})" if shown else "")


def _wrong_parts(dim: int, size: int, axis: str, parts: Sequence[int]) -> str:
    swaps = ", ".join(f"{part} in place of {place}" for place, part in enumerate(parts) if part != place)
    return f"along dim {dim} it holds the wrong parts of {size} ({axis}): {swaps}"


def _other_moments(step: int, moments: Sequence[tuple[str, float, float]]) -> str:
    parts = (
        f"the {what} is {describe_factor(factor)} the right one" + (f" and {past:.4g} x the one before" if past else "")
        for what, factor, past in moments
    )
    return f"in step {step} {', '.join(parts)}"


def _step_before(step: int) -> str:
    return f"step {step}" if step else "the first step"


def _list_names(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + " ..." * (len(names) > _SHOWN)


def _ranks_of(over: str) -> str:
    """The ranks of an axis, "tp=2", or all ranks."""
    return over if over == _ALL_RANKS else f"the ranks of {over}"


def _some_ranks(ranks: Sequence[int]) -> str:
    return f"ranks {', '.join(map(str, ranks[:4]))}{' and others' if len(ranks) > 4 else ''}"


def _counted_often(what: str, axis: str, size: int, one: bool) -> str:
    often = f"{size} times, and {axis}={size}" if one else f"once a rank, {axis}={size}"
    return f"it counts {what} {often}"


def _never_asked(micro: Sequence[int], step: int, ranks: Sequence[int], truth: Sequence[int]) -> str:
    plural = "es" * (len(micro) > 1)
    never = f"samples of micro-batch{plural} {ranks_text(micro)} were never asked for (case.samples)"
    return f"{never}: {_compare_samples(step, ranks, truth)}"


def _compare_samples(step: int, ranks: Sequence[int], truth: Sequence[int]) -> str:
    return f"in step {step} the ranks ask for samples {ranks_text(ranks)}, and the truth for {ranks_text(truth)}"


def _draws(draw: str, beside: str, by_ranks: bool) -> str:
    other = f"a run with {beside}" if beside else "the truth"
    drawn = f"other numbers than {other} does" if by_ranks else f"numbers in {other} that the ranks do not draw"
    switch = "switch that off for the proof, or seed it by the numbers of the samples (case.samples)"
    return f"{draw} draws {drawn}, so nothing behind it can agree: {switch}, on ranks and truth"


def _changed_call(changes: Sequence[tuple[str, str, str]]) -> str:
    fields = (f"{field} {found or '-'} instead of {expected or '-'}" for field, found, expected in changes)
    return f"the call is made otherwise: {', '.join(fields)}"


def _names_of(witnesses: Sequence[str]) -> str:
    return " and ".join(_WHO[name] for name in _WHO if name in witnesses)


_MEANT = "where it is meant, subject.compute_dtype or subject.wire_dtype states it"
FROM_CAUSES: Mapping[str, str | Callable[..., str]] = {
    "at_start": "initial values, before any step: {cause:fact}",
    # sums and means
    "own_sum_in_part": "what is wrong in it is one data rank's own sum",
    "own_micro_batches": "each data rank's own micro-batches alone are in it",
    "own_tokens": "every data rank divides by the tokens that it counted itself, not by those of all data ranks",
    "some_data_ranks": "only data rank {kept:all} of {of} is in it",
    "micro_batches_missing": "micro-batch {lost:all} of {of} is missing in it",
    "some_missing": "some micro-batches of some data ranks are missing in it",
    "micro_batch_tokens": "every micro-batch is divided by its own tokens, not by those of the step",
    "averaged_alike": lambda axis, weights: (
        f"the gradients of the {axis} ranks are averaged with equal weights; the truth weighs them "
        + ", ".join(f"{one:.4g}" for one in weights)
    ),
    "counted_times": lambda weights: (
        f"its micro-batches count {', '.join(f'{one:.3g}' for one in weights)} times instead of once each"
    ),
    "partial_sums": lambda over: (
        f"the sum over {_ranks_of(over)} is the truth: each rank holds a partial sum that was never reduced"
    ),
    "never_averaged": lambda over, axis: (
        f"the mean over {_ranks_of(over)} is the truth: each rank holds its own, never averaged over {axis}"
    ),
    "factor": _factor,
    # norms
    "norm_of_parts": "each rank's norm is that of its own parts",
    "norm_unsummed": lambda axis: (
        "it is the norm of gradients before they are summed over ranks, "
        + (f"added up over {axis}" if axis else "on each rank of its own")
    ),
    "norm_of_rank": "it is the norm of rank {rank}'s own parts",
    "counted_often": _counted_often,
    "counted_one_of": lambda what, axis, size: (
        f"it counts 1 of {size} ranks{'' if axis == _ALL_RANKS else f' of {axis}'} in {what}"
    ),
    "counted_twice": "it counts {what} twice",
    "norms_added": "it is the sum of the norms of {what} and of all else, not the root of the sum of their squares",
    "left_out_of_norm": "it leaves out {what}",
    "counts_replicas": "it adds up what {axis} ranks hold, replicas too",
    # a whole tensor
    "not_finite": "{share:.0%} of it is NaN or infinite",
    "not_finite_on": lambda ranks: f"on {name_ranks(ranks)} it is NaN or infinite",
    "zero": "it is zero throughout",
    "equals": "it equals {other} of the dense model",
    "last_bits": "every rank's is right but for its last bits",
    "rounded": "explained by rounding to {dtype}: all its numbers are ones of it; " + _MEANT,
    "rounded_on_ranks": "explained by rounding to {lower}; the case is in {dtype}, and on one rank no such "
    "rounding reaches them; " + _MEANT,
    # the right numbers in wrong places
    "shifted": "along dim {dim} it is shifted by {shift} of {size} shards ({axis})",
    "shards_reordered": "along dim {dim} the {size} shards of {axis} are in another order",
    "rows_reordered": "along dim {dim} it holds the right rows in another order",
    "wrong_parts": _wrong_parts,
    "parts_moved": "along dim {dim} right numbers stand apart: from {place} on they are those that belong at {source}, "
    "and {lost} of them are nowhere",
    "dims_exchanged": "dims {one} and {other} are exchanged in memory",
    "flat_shards": "it holds the right numbers as if flat memory were its {size} shards along dim {dim} ({axis})",
    "at_other_place": "along dim {dim} rank {rank} holds what lies at {start}, where {right} is meant",
    "slices_of_others": lambda dim, names: f"along dim {dim} it holds slices of {_list_names(names)}",
    "part_as_whole": lambda size, dim, axis, shape: (
        f"1 of {size} parts along dim {dim} ({axis}) told as the whole: return Shard(local, offsets, {tuple(shape)}) "
        "where a rank holds a part"
    ),
    # steps of an optimizer
    "as_before": lambda names, step: (
        f"{_list_names(names) if names else 'the parameters'}: as before {_step_before(step)}"
    ),
    "as_before_on": lambda ranks, step: f"on {name_ranks(ranks)} the parameters are as before {_step_before(step)}",
    "not_returned": lambda names: f"no rank returned {_list_names(names)}, and the parameters did not move",
    "first_gradient_again": "step {step} holds the gradient of the first step once more",
    "other_moments": _other_moments,
    "moment_with_parameters": "in step {step} the {moment} holds {share:.3g} x the parameters",
    "update_with": "the updates of step {step} are {factor:times} the right ones and {share:.3g} x {beside}",
    # what ranks and truth begin with
    "group_samples": "ranks {rank} and {other} of one {axis} group ask for different samples (case.samples): in step "
    "{step} for {mine:ranks} and for {theirs:ranks}",
    "samples_never_asked": _never_asked,
    "samples_differ": lambda step, ranks, truth: (
        f"other samples than those of the truth were asked for (case.samples): {_compare_samples(step, ranks, truth)}"
    ),
    "starts_as_other": lambda rank, name, other, at, returned: (
        f"initial values: rank {rank} begins with the part of {name} that rank {other} returns, at {tuple(at)}, and "
        f"returns {tuple(returned)}"
    ),
    "starts_otherwise": "initial values: rank {rank} begins with another {name} than the truth, before any step",
    "draws": _draws,
    "masks_drawn_anew": "recomputation drew masks that its forward did not draw",
    "one_mask": lambda ranks, axis: (
        f"{_some_ranks(ranks)} hold different shards {f'over {axis} ' if axis else ''}and drop by one mask"
    ),
    "own_masks": lambda ranks: f"{_some_ranks(ranks)} hold the same tensor and drop by independent masks",
    "mask_of_other": lambda module, ranks: (
        f"{name_ranks(ranks)} drop{'s' * (len(ranks) == 1)} by a mask of {module}, which other ranks alone compute"
    ),
    # calls
    "other_ranks": "calls named {axis} run over the ranks {ran:lists}; the rank lists of axis {axis} are {lists:lists}",
    "call_left_out": "the {op} over {axis} is left out",
    "call_too_many": "one {op} over {axis} too many",
    "changed_call": _changed_call,
    "fewer_than_counted": "calls that this term counts are left out",
    "more_than_counted": "more calls than this term counts",
    "other_than_counted": "the calls that this term counts are of other sizes",
    # what a check or the end of a run says by itself
    "truth_by_dtype_alone": "in float32 the dense model is another one than in float64; draw its numbers in float64 "
    "and round them, torch.randn(..., dtype=torch.float64).to(dtype)",
    "no_name_of_truth": "no name that the subject returns is one of the truth's",
    "parts_no_whole": "the ranks' parts do not make the full tensor, as the check states",
    "no_wait": "its wait() was never called",
    "nothing_parallel": "ranks of a case that splits send nothing, or hold everything, as the check states",
    "not_repeatable": "two runs of the same ranks on the same data differ: some number does not follow from the case",
    "step_taken": "the optimizer takes step {step}, which the truth skips",
    "no_product": "no product is computed between the call and its wait",
    "watched_differs": "the run that is watched and the one that is not differ",
    "calls_parted": "the ranks issued different calls, or not as many: the line above says where each stood",
    "process_ended": "the process of a rank ended before the subject returned",
    "no_further_call": "a rank came to no further call in time: the line above says where it stood",
    "raised": "the subject raised: the line above says where each rank stood",
    "time_up": "the time was up",
    "machine_failed": "the machine failed",
    # witnesses
    "watched_outcome": "the outcome of a run that is watched is another one",
    "no_collective": "no rank of {ranks} issues a collective here",
    "other_calls": "on processes of their own the ranks issue other calls than on the engine that proved the case",
    "unlike_recorder": lambda witnesses: (
        f"{_names_of(witnesses)} tell{'s' * (len(witnesses) == 1)} it otherwise than the recorder"
    ),
    "unlike_closed_form": lambda witnesses: (
        f"the program issues other calls than its closed form states: {_names_of(witnesses)} saw the same"
    ),
    "alone_otherwise": lambda witnesses: f"{_names_of(witnesses)} alone tell{'s' * (len(witnesses) == 1)} it otherwise",
}
