"""The sentences of checks: id -> template (`rendering` says what a template may hold)."""

import math
from collections.abc import Callable, Mapping, Sequence

from shardproof.harness.errors import ranks_text
from shardproof.harness.verdicts.sentences.formats import join_names


def _nothing_checkable(returned: Sequence[str], truth: int, known: Sequence[str]) -> str:
    got = f"it returned {join_names(returned)}" if returned else "it returned nothing"
    return f"nothing checkable: {got}; the truth has {truth} names, such as {', '.join(known)}"


def _list_missing(names: Sequence[str], kind: str) -> str:
    verb, them = ("is", "it") if len(names) == 1 else ("are", "them")
    rule = f"return {them}, or declare what is left out as subject.unchecked = ({names[0]!r},)"
    return f"{join_names(names)} {verb} missing beside other {kind}/ names: {rule}"


def _unknown_names(names: Sequence[str], nearest: Sequence[str]) -> str:
    known = [name + (f" ({near}?)" if near else "") for name, near in zip(names, nearest, strict=True)]
    return f"the truth does not know {join_names(known)}: leave out what nobody can check, or name it as it does"


def _no_such_name(word: str, pattern: str, nearest: str) -> str:
    return f"{word}={pattern!r} matches no name of the truth{f' ({nearest}?)' if nearest else ''}"


def _bits_differ(differing: int, elements: int, odd: int, largest: float | None, first: Sequence[int]) -> str:
    size = "" if largest is None else f", by up to {largest:.2g}"
    place = f", first at {tuple(first)}" if first else ""
    return f"in {differing} of {elements} elements{f', NaN or infinite in {odd}' if odd else ''}{size}{place}"


def _forms_differ(shape: Sequence[int], dtype: str, other_shape: Sequence[int], other_dtype: str) -> str:
    return f"in form: {tuple(shape)} {dtype} against {tuple(other_shape)} {other_dtype}"


def _shapes_differ(rank: int, shape: Sequence[int], other: int, other_shape: Sequence[int]) -> str:
    says = f"rank {rank} says {tuple(shape)}, rank {other} says {tuple(other_shape)}"
    return f"the ranks disagree on the full shape: {says}"


def _equal_sequences(ran: int, ranks: int, classes: Sequence[Sequence[int]]) -> str:
    alike = " | ".join(map(ranks_text, classes))
    return f"{ran} of {ranks} ranks run, in {len(classes)} class(es) of equal sequences: {alike}"


def _silent(ranks: Sequence[int], mesh: str) -> str:
    whom = f"not rank {', '.join(map(str, ranks))}" if ranks else "no rank"
    return f"{whom} sent or received anything in a mesh of {mesh}"


def _document_leak_forward(of: int, other: int, token: int, rank: int, gap: float, before: str, place: str) -> str:
    what = f"document {of} changes document {other}: token {token} on rank {rank} changes by {gap:.3g}"
    return f"{what} {_between_lines(before, place)}"


def _document_leak_backward(of: int, other: int, token: int, rank: int, gap: float, before: str, place: str) -> str:
    what = f"the gradient of document {of} reaches document {other}: token {token} on rank {rank} gets {gap:.3g} more"
    return f"{what} of it {_between_lines(before, place)}"


def _between_lines(before: str, place: str) -> str:
    return f"between {before} and {place}" if before else f"at {place}"


def _call_differs(kind: str, place: str, calls: int, found: str, expected: str, expected_place: str) -> str:
    where = f"{kind} event in {place} ({calls} call{'s' * (calls > 1)})"
    if kind != "wrong":
        return f"{where}: {found or expected}"
    return f"{where}: {found}; expected {expected}{f' in {expected_place}' if expected_place else ''}"


def _place_behind(region: str, caller: str) -> str:
    return (f", module {region}" if region else "") + (f", at {caller}" if caller else "")


def _unequal_messages(
    axis: str, ranks: Sequence[int], sent: Sequence[int], received: Sequence[int], region: str, caller: str
) -> str:
    came = f"receives {received[0]} of {received[1]} B"
    return f"{axis} group {list(ranks)} sends {sent[0]} messages of {sent[1]} B and {came}" + _place_behind(
        region, caller
    )


def _no_conjugate(axis: str, forward: Sequence[int], backward: Sequence[int], region: str, caller: str) -> str:
    there = f"{forward[0]} all-to-alls of {forward[1]} B over {axis} go forward"
    back = f"{backward[0]} of {backward[1]} B backward"
    return f"{there} and {back}: each must have its conjugate{_place_behind(region, caller)}"


def _not_gathered_back(calls: int, payload_bytes: int, dtype: str, axis: str, region: str, caller: str) -> str:
    there = f"{calls} reduce_scatters of {payload_bytes} B {dtype} over {axis} in forward of {region or 'no module'}"
    return f"{there} have no all_gather of their gradients in its backward{_place_behind('', caller)}"


def _unlike_grouping(name: str, words: str, here: str, ratio: float, grows: Sequence[str], falls: Sequence[str]) -> str:
    mean = "a mean of means, where counts of tokens differ?"
    times = f"{ratio:.4g} times" if math.isfinite(ratio) else "no multiple of"
    if not math.isfinite(ratio):
        why = mean
    elif grows:
        why = f"the factor grows with {' or '.join(grows)}"
    elif falls:
        why = f"the factor falls as {' or '.join(falls)} grows"
    else:
        why = f"no ratio of sizes: {mean}"
    return f"the same samples in other groups: with {words} {name} is {times} what it is with {here} ({why})"


_WHY_UNDECIDED = {
    "rounding": "rounding alone explains any error",
    "stated": "every one deviates as stated",
    "strange": "the truth has none of these names",
}


def _none_compared(why: str, kind: str = "", first: str = "", flawed: Sequence[str] = ()) -> str:
    what = f"none of the {kind}" if kind else "nothing of this kind"
    if why == "flawed":
        return f"{what} was compared: check {' or '.join(flawed)} already found the ranks' parts wrong"
    return f"{what} was compared: {_WHY_UNDECIDED[why]}{f'; first: {first}' if first else ''}"


def _moved_tokens(
    rank: int, moved: int, tokens: int, at: Sequence[int], sent: Sequence[int], other: int, must: Sequence[int]
) -> str:
    to, there = (" ".join(map(str, experts)) or "none" for experts in (sent, must))
    first = f"the first, {tuple(at)}, to {to}, on rank {other} to {there}"
    return f"rank {rank} sends {moved} of {tokens} tokens to other experts: {first}"


def _drawn_anew(line: str, rank: int, others: int) -> str:
    elsewhere = f", and {others} times elsewhere" if others else ""
    drops = f"backward drops by another mask than forward at {line} on rank {rank}{elsewhere}"
    return f"{drops}: recomputation drew anew, from a random state that was not restored"


_COPIED = "; return it on every rank, or as a Shard where only some ranks hold it"
FROM_CHECKS: Mapping[str, str | Callable[..., str]] = {
    "text": "{text}",  # words of a subject, an exception or a tool
    "check_failed": "the check itself failed: {problem}",
    "not_run": "the failure is explained without some runs ({parts:all}): no time was left of the {limit_s:g} s "
    "for all of them; legal: a larger --timeout",
    # what was returned
    "returned": "{returned} of {truth} tensors of the truth were returned",
    "left_out": "{count} left out on purpose",
    "unmergeable": "nothing is compared: what the ranks drew does not make one tensor that a dense model can be given",
    "nothing_checkable": _nothing_checkable,
    "declares_all": lambda patterns: (
        f"unchecked={tuple(patterns)} declares every name of the truth, so it says nothing; legal: ('grad/*.bias',)"
    ),
    "deviates_all": lambda patterns: (
        f"deviates={tuple(patterns)} states every name of the truth, so it says nothing; legal: 'act/*'"
    ),
    "missing": _list_missing,
    "unknown_names": _unknown_names,
    "no_such_name": _no_such_name,
    # how blocks merge
    "merged": "{count} tensors merge",
    "equal_replicas": "{count} tensors have equal replicas",
    "flawed": "{name}: {flaw:fact}",
    "unequal_replicas": "{name}: ranks that should hold the same values do not: {flaw:fact}",
    "shape_of_truth": lambda shape, truth: f"the full shape is {tuple(shape)}, that of the dense model {tuple(truth)}",
    "dtype_of_truth": "the dtype is {dtype}, that of the dense model {truth}",
    "held_nowhere": "no rank holds any part of it",
    "not_given": "the truth takes it from the ranks, and no rank returned it",
    "not_on_all_ranks": "a full tensor on {holders:rank|ranks} {holders:ranks} is not returned by "
    "{absent:rank|ranks} {absent:ranks}" + _COPIED,
    "elements_missing": lambda missing, elements, first: (
        f"{missing} of {elements} elements are held by no rank; first missing at {tuple(first)}"
    ),
    "shapes_differ": _shapes_differ,
    "dtypes_differ": "the ranks disagree on the dtype: rank {rank} returns {dtype}, rank {other} {other_dtype}",
    "reductions_differ": "pending reductions differ: rank {rank} {reduce_op!r}, rank {other} {other_reduce_op!r}",
    "replicas_differ": "rank {rank} differs from rank {other} {how:fact}",
    "overlap_differs": "rank {other} differs from rank {rank} {how:fact} of what both hold, {common}; rank {rank} "
    "holds {region} and rank {other} {other_region}",
    "bits_differ": _bits_differ,
    "forms_differ": _forms_differ,
    # packed rows
    "documents_unknown": "documents could not be told apart: {problem}",
    "one_document": "the step has one document, so nothing can cross a border; legal: rows of several documents",
    "documents_apart": "{documents} documents: none changes another one, and no gradient crosses a border",
    "document_leak_forward": _document_leak_forward,
    "document_leak_backward": _document_leak_backward,
    "leak_as_rounding": "as little as rounding may change it: a number of rows that changes with what they hold can "
    "round otherwise",
    # values beside the truth
    "agree": "{count} tensors agree; {closest} came closest to its limit",
    "differs": "{name} differs from the dense model",
    "overflows": "{name} is not finite, and not in the dense model in this dtype either (legal: a smaller lr, or "
    "fewer steps)",
    "none_compared": _none_compared,
    "miscounted": "{name} is {counted}, and the dense model counts {truth}",
    "made_by_step": "{name} is a state that only a step of the optimizer makes, and the dense model skips that step",
    "of_own_gradients": "the dense model's optimizer makes another step of the gradients that the ranks returned",
    "within_lower": "within the limits of {lower}; no case on one rank shows whether the model has it too",
    "given_to_truth": "the dense model was given them",
    "more_wrong": "{count} more of {of} are wrong",
    # initial values and checkpoints
    "starts_right": "{stated} of {names} parameters begin with the right deviations, and no two alike",
    "not_constant": "{name} has a standard deviation of {deviation:.3g}, and begins as a constant",
    "other_deviation": "{name} has a standard deviation of {deviation:.3g}, which must be {right:.3g}",
    "equal_starts": "{name} on rank {rank} holds the numbers of {other} on rank {other_rank}",
    "saved_differs": "{name}: the files of the checkpoint and {beside} differ {how:fact}",
    "saved_lacks": "the files of the checkpoint lack {lost} of {count} tensors that the truth's has, first {name}",
    "nothing_saved": "the ranks returned nothing that was saved",
    "saved_right": "{count} tensors of the checkpoint are those of the ranks in every bit",
    # masks of dropout
    "mask_dtype": "{name} must be a tensor of bool, True where dropout keeps",
    "drawn_anew": _drawn_anew,
    "mask_rate": "{name} keeps {kept} of {elements} elements on rank {rank}, and its rate of dropout is {rate:g}",
    "masks_alike": "{name}: ranks {rank} and {other}, which hold different shards, agree in {agree} of {elements} "
    "elements, independent ones in about {expected:.0f}",
    "mask_twice": "{mask} is that of {other}: a mask was drawn twice",
    "improbable": "{test:fact} (probability {probability:.1g}, allowed {allowed:.1g})",
    "more_improbable": "{count} more of {tests} tests fail",
    "masks_right": "{tests} exact tests of {masks} masks find none improbable",
    # choices of experts
    "other_experts": "{name}: {how:fact}; rank {ranks:ranks} {ranks:parts|part} from rank {first}, which holds the "
    "same tokens",
    "moved_tokens": _moved_tokens,
    "other_form": "rank {rank} returns a map of another form than rank {other}",
    "other_bits": "rank {rank} returns other bits than rank {other} for the same choices",
    "more_maps": "{count} more of {maps} maps differ",
    "no_copies": "no rank holds a copy of another one's map, and the truth has none to compare them with",
    "equal_maps": "{count} maps are equal on all ranks that hold the same tokens",
    "busiest": "busiest: expert {expert} of {map}, {times:.3g} times the mean",
    # calls
    "calls_as_expected": lambda least, most: (
        f"{least if least == most else f'{least} to {most}'} events a rank, exactly as expected"
    ),
    "calls_as_stated": "{most} events a rank, as the closed form states",
    "lawful": "{events} events obey the general laws",
    "unmapped": "operator {operators} of torch is not known to this release of shardproof ({calls} {calls:call|calls}, "
    "the first at {caller}): what it sends is not known, so the ledger (op other) cannot be compared",
    "unmapped_rows": "operator {operators} of torch is not known to this release of shardproof, nor are its rows in a "
    "trace",
    "call_differs": _call_differs,
    "count_differs": "expected {term}",
    "more_lines": "{count} more lines differ",
    "unequal_messages": _unequal_messages,
    "no_conjugate": _no_conjugate,
    "not_gathered_back": _not_gathered_back,
    "groups_right": lambda axes: f"every group named {', '.join(axes) or 'no axis'} is a rank list of its axis",
    "stray_groups": "{count} calls named {axis} run over the ranks {ran:lists}, which are no rank lists of axis "
    "{axis}: {lists:lists}; legal: the groups of these ranks, or subject.axes(case) that states another rank order",
    "equal_sequences": _equal_sequences,
    "rank_holds": lambda rank, parts: (
        f"rank {rank} holds, in GiB: {', '.join(f'{what} {size / 2**30:.3g}' for what, size in parts)}"
    ),
    "all_waited": "all {count} asynchronous calls were waited for before their results were read",
    "never_waited": "{op} #{number} of {group} at {caller} was never waited for",
    "more_like_it": "{count} more like it",
    "hidden": "{most} calls a rank travel behind products, as promised",
    "exposed": "{count} of {promised} calls of rank {rank} that should travel behind a product do not: the first is "
    "{call} in {place} at {caller}, with no product between its issue and its wait",
    "silent": _silent,
    "ranks_talk": "{talking} of {ranks} ranks talk over {mesh}",
    "no_split_weights": "no axis of it splits weights",
    "shards_smaller": "{smaller} of {shards} sharded tensors are smaller on a rank",
    "shards_whole": "every rank holds the full tensor of all {shards} shards in a mesh of {mesh}",
    # runs of one case beside each other
    "runs_agree": "{runs} runs: runs agree in every bit",
    "recording_right": "{runs} runs: recording changes no bit",
    "runs_differ": "{name} on rank {rank} differs between two runs of the same case: {how:fact}",
    "recording_differs": "{name} on rank {rank} differs between the recorded run and an unrecorded one: {how:fact}",
    "run_not_ended": lambda words, problem: (
        f"the run {f'with {words}' if words else 'that nothing records'}, beside which this is compared, did not end: "
        f"{problem}; the case's own run has ended"
    ),
    "returned_once": "only one of the runs returned it",
    "moved_blocks": "its blocks lie in other places",
    "same_step": lambda groupings: (
        f"the same step as with {', '.join(groupings)}" if groupings else "no other grouping was compared"
    ),
    "torn_grouping": "{name} with {words}: {flaw:fact} ({kind}), which is whole with {here}",
    "unlike_grouping": _unlike_grouping,
    "model_by_grouping": "{change:fact}; so is the dense model's, which takes these groups too: its function is one of "
    "a whole micro-batch, as that of batch norm is, or both are wrong alike; legal: one number of micro-batches, as in "
    'words = {{"micro": (1,)}}',
    "truth_by_dtype": "the dense model's function depends on the dtype, so it is compared in {dtype}",
    "truth_same": "the dense model is one function in float32 and in float64; {closest} came closest to the limit",
    "truth_other": "the dense model computes another function in float32 than in float64, as {name} of its forward "
    "shows",
    # witnesses
    "none_seen": lambda steps: (
        f"no witness saw any event{f' in steps {steps}' if steps else ''}: nothing was witnessed"
    ),
    "witnesses_agree": lambda witnesses, events, ranks, steps: (
        f"{', '.join(witnesses)} agree on {events} events of {ranks} ranks{f' in steps {steps}' if steps else ''}"
    ),
    "more_events": "{count} more {count:event differs|events differ}",
    "not_asked": "the closed form was not asked: {why}",
    "tool_failed": "{tool}: {problem}",
    "disturbed": "the outcome of {ranks:rank|ranks} {ranks:all} is not the same bit for bit when the recorder and "
    "{tool} watch",
    "not_witnessed": lambda reasons: f"nothing was witnessed: {'; '.join(reasons) or 'no session was held'}",
}
