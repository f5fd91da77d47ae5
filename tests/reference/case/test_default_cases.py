"""The default cases: which pairs of values they hold, found out from other legal cases than their own search's."""

import dataclasses
import functools
import random
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.default_cases import STATES, Pairs, Search
from shardproof.reference.case import Case, CaseError
from shardproof.reference.case.default_cases import FIXED, NUMBERS, RANKS, default_cases, line_of, lines, paired_domains
from shardproof.reference.case.domains import domains, repair_words, words_of
from shardproof.reference.features import FEATURES, PARTS, WORDS
from shardproof.reference.language.core import MODES
from shardproof.reference.language.words import declared_words, legal_values

Level = tuple[str, object]
Pair = frozenset[Level]
FEW = 4


LEVELS = [(word, value) for word, values in paired_domains().items() for value in values]
OF_A_MODE = torch.tensor([word == "mode" for word, _ in LEVELS])


def levels(case: Case) -> list[Level]:
    return [(word, value) for word, value in LEVELS if getattr(case, word) == value]


def pairs(cases: Iterable[Case]) -> Tensor:
    """Whether a case has both levels, of every pair of LEVELS."""
    has = [[getattr(case, word) == value for word, value in LEVELS] for case in cases]
    count = torch.tensor(has, dtype=torch.float32).reshape(-1, len(LEVELS))
    return (count.T @ count > 0).triu(1)


def splits(case: Case) -> bool:
    return case.tp > 1 or case.wp > 1


def sizes(case: Case) -> tuple[int, ...]:
    return (case.hidden, case.heads, case.ffn, case.vocab, case.seq, case.batch, case.micro, case.head_dim)


def lacking(cases: Collection[Case]) -> tuple[Tensor, Tensor]:
    """Pairs that none of these cases holds; and those with a mode, where no case that holds it splits something."""
    return ~pairs(cases), ~pairs(filter(splits, cases)) & (OF_A_MODE[:, None] | OF_A_MODE)


def missing(cases: Collection[Case], others: Iterable[Case]) -> set[Pair]:
    """The pairs of other cases of the same sizes that none of these holds.

    Pairs with a mode count where it splits something, if the other one does so over few ranks.
    """
    alike = []
    for case in others:
        axes = {case.tp, case.dp, case.pp, case.cp, case.wp} - {1}
        same = all(getattr(case, word) == NUMBERS[word] for word in NUMBERS if word != "seq")
        same = same and len({*sizes(case)}) == len(sizes(case))
        if same and case.world_size <= RANKS and case.micro not in axes:
            alike.append(case)
    few = [case for case in alike if splits(case) and case.world_size <= FEW]
    anywhere, split = lacking(cases)
    found = (pairs(alike) & anywhere) | (pairs(few) & split)
    return {frozenset((LEVELS[one], LEVELS[other])) for one, other in found.nonzero().tolist()}


@functools.cache
def changed(count: int, modes: tuple[str, ...] = tuple(MODES)) -> tuple[Case, ...]:
    """Legal cases: each is one before it with a few random words at random values."""
    source, values = random.Random(0), paired_domains() | {"mode": modes}
    found = [case for case in default_cases(modes) if case.heads == NUMBERS["heads"]]
    while len(found) < count:
        fixed = {word: source.choice(values[word]) for word in source.sample(sorted(values), source.randint(1, 3))}
        words = repair_words(words_of(source.choice(found)), fixed, values)
        if words and 2 <= (case := Case(**words)).world_size <= RANKS:
            found.append(case)
    return tuple(found)


def missing_of_near(cases: Sequence[Case], *between: str) -> set[Pair]:
    """The legal pairs, of these words or of all, that none of these cases holds.

    Each is tried in twenty of them, with what the rules propose.
    """
    source, varied, words_of_cases = random.Random(1), paired_domains(), [words_of(case) for case in cases]
    anywhere, split = lacking(cases)
    legal = []
    for one, other in (anywhere | split).triu(1).nonzero().tolist():
        fixed = dict((LEVELS[one], LEVELS[other]))
        if len(fixed) == 2 and (not between or {*between} == {*fixed}):
            near = source.sample(words_of_cases, 20)
            found = filter(None, (repair_words(words, fixed, varied) for words in near))
            legal += [case for words in found if 2 <= (case := Case(**words)).world_size <= RANKS]
    return missing(cases, legal)


def test_every_legal_pair_of_values_is_in_a_default_case() -> None:
    cases = [case for section in lines().values() for case in section]
    assert missing_of_near(cases) == set(), "python -m bench.default_cases --seconds 600 finds cases for new words"
    fewer = [case for case in cases if case.zero != 3 or not case.packed]
    lost = frozenset({("zero", 3), ("packed", True)})
    assert lost in missing_of_near(fewer, "zero", "packed"), "a pair that is not there is missed"


@pytest.mark.deep("six CPU seconds")
def test_most_triples_of_values_that_meet_in_a_file_are_there() -> None:
    known = Pairs()

    def held(cases: Iterable[Case]) -> Tensor:
        return torch.from_numpy(np.any([known.triples_of(words_of(case)) for case in cases], axis=0))

    possible = held(changed(1000)[:600])
    assert (possible & held(default_cases(checkpoint="ck"))).sum() > 0.95 * possible.sum()


def test_every_next_case_holds_most_of_the_pairs_that_none_before_it_has() -> None:
    cases = default_cases()[len(MODES) :]
    held = [pairs([case]) for case in cases]
    seen = torch.zeros_like(held[0])
    for place, own in enumerate(held):
        more = [int((other & ~seen).sum()) for other in held[place:]]
        assert more[0] == max(more), cases[place]
        seen |= own
    new = [int(pairs(cases[:count]).sum()) for count in (len(cases) // 4, len(cases))]
    assert new[0] > 0.8 * new[1], "a quarter of the cases has most pairs"


def test_every_value_is_in_a_long_case_and_states_that_last_are_there_together() -> None:
    """Long: two layers, and a step behind the first, or behind one that `parity` compares; for states micro-batches."""

    def long(cases: Iterable[Case]) -> list[Case]:
        return [case for case in cases if case.layers > 1 and case.steps > max(1, case.parity)]

    def of_states(cases: Iterable[Case]) -> Tensor:
        lasting = torch.tensor([word in STATES for word, _ in LEVELS])
        return pairs(case for case in long(cases) if case.micro > 1) & lasting[:, None] & lasting

    cases = default_cases()
    held = {level for case in long(cases) for level in levels(case)}
    kept = {level for case in long(cases) if case.micro > 1 for level in levels(case)}
    lasting = {level for case in cases for level in levels(case) if level[0] in STATES}
    assert {level for case in cases for level in levels(case)} - held == set()
    assert lasting - kept == set()
    more = [case.but(**{"steps": 3, "layers": 2, "micro": 3}) for case in changed(1000)[:400] if _can_be_longer(case)]
    missing = (of_states(more) & ~of_states(cases)).nonzero().tolist()
    assert [(LEVELS[one], LEVELS[other]) for one, other in missing] == []
    assert sum(case.steps == 1 for case in cases) > len(cases) / 2


def _can_be_longer(case: Case) -> bool:
    with suppress(CaseError):
        longer = case.but(steps=3, layers=2, micro=3)
        return len({*sizes(longer)}) == 8 and 3 not in {case.tp, case.dp, case.cp}
    return False


def test_the_cases_can_show_a_bug() -> None:
    cases = [case for section in lines().values() for case in section]
    assert len({*cases}) == len(cases) and {case.mode for case in cases} == {*MODES}
    for case in cases:
        axes = {case.tp, case.dp, case.pp, case.cp, case.wp} - {1}
        assert 2 <= case.world_size <= RANKS
        hidden = case.dtype == "bfloat16" and case.master == "none"  # a small step is lost where parameters are stored
        free = {"seq", "ffn", "vocab", *(["lr"] if hidden else [])}
        assert {word for word in NUMBERS if getattr(case, word) != NUMBERS[word]} <= free
        assert not {case.micro, case.batch} & axes, case
        assert len({*sizes(case)}) == len(sizes(case)), case
    assert {case.world_size for case in cases} >= {2, 3, 4, 8}
    assert any(case.padded_vocab // case.tp * (case.tp - 1) >= case.vocab for case in cases), "a rank of padding alone"


SIZES_OF_ALL = {"hidden", "heads", "batch", "seed"}
ONE_VALUE = {
    "bucket": "elements of a buffer: which parameters share it is what shows",
    "recompute_layers": "its default is a number of layers too",
    "qk_rope_dim": "its default is a width too",
    "ffn": "follows tp",
}


def test_no_constant_and_no_other_number_could_stand_for_a_number() -> None:
    """A rule that reads another word in its place, or a constant, half, twice or one beside it, differs somewhere."""
    plain, cases = Case(), default_cases(checkpoint="ck")
    whole = [field.name for field in dataclasses.fields(Case) if type(getattr(plain, field.name)) is int]
    sizes_of = {case: {word: getattr(case, word) for word in whole} | {"world": case.world_size} for case in cases}
    likely = {"": lambda n: n, "half ": lambda n: n // 2, "twice ": lambda n: 2 * n, "-1": lambda n: n - 1}
    likely |= {"+1": lambda n: n + 1}
    for word in (word for word in whole if word not in SIZES_OF_ALL):
        used = [sizes for sizes in sizes_of.values() if sizes[word] not in (0, getattr(plain, word))]
        assert word in ONE_VALUE or len({sizes[word] for sizes in used}) > 1, word
        for other in (other for other in (*whole, "world") if other != word):
            for name, formula in likely.items():
                same = all(formula(sizes[other]) == sizes[word] for sizes in used)
                assert not same or word in ONE_VALUE, (word, f"{name} {other}")


def test_words_without_pairs_have_their_reason() -> None:
    assert FIXED.keys() & domains().keys() | paired_domains().keys() == domains().keys()
    unnamed = {field.name for field in dataclasses.fields(Case)} - {*domains(), *FIXED}
    assert unnamed == {"preset", "variant"}


def test_recipes_have_every_word_of_a_part_away_from_its_default() -> None:
    plain, found = Case(), lines()["recipes"]
    words = [word for owner in PARTS for word in declared_words(FEATURES[owner])]
    assert [word for word in words if all(getattr(case, word) == getattr(plain, word) for case in found)] == []
    with_experts = [case for case in found if case.experts]
    for word in ("router", "dispatcher", "drop"):
        assert {getattr(case, word) for case in with_experts} == {*legal_values(WORDS[word])}
    assert any(case.ep > 1 and case.axis_sizes["edp"] > 1 for case in with_experts), "copies of experts"


def test_one_mode_has_every_pair_that_it_can_have() -> None:
    found = changed(1000)
    for mode in MODES:
        plain, *cases = default_cases([mode])
        assert {case.mode for case in cases} == {mode} and plain.world_size == 2 and len(cases) < len(default_cases())
        possible = pairs(case for case in found if case.mode == mode)
        assert (possible & ~pairs((plain, *cases))).sum() < 0.02 * possible.sum(), mode


def test_deep_takes_every_case_in_every_mode_twice_as_long() -> None:
    plain, *cases = default_cases(["msp"], deep=True)
    stored = [case for section in lines().values() for case in section]
    assert len(cases) > 0.8 * len(stored)
    assert {case.mode for case in cases} == {"msp"} and {case.steps for case in cases} == {2, 3, 4}


def test_what_a_subject_refuses_is_left_out_and_the_rest_is_there() -> None:
    def refuses(case: Case) -> str:
        return "no packs, no learned positions" if case.packed or case.positions == "learned" else ""

    cases = default_cases(["msp"], refuses)
    assert not any(refuses(case) for case in cases[1:]) and len(cases) > 30
    taken = [case for case in changed(200, ("msp",)) if not refuses(case)]
    assert (pairs(taken) & ~pairs(cases)).sum() < 0.1 * pairs(taken).sum()
    assert len(default_cases(["tp"], lambda case: "never")) == 1, "its skip says why"
    built_for_8_heads = default_cases(["tp"], lambda case: "" if case.heads == 8 else "8 heads only")
    assert {case.heads for case in built_for_8_heads} == {8} and len(built_for_8_heads) > 30


def test_checkpoints_of_all_kinds_are_saved_at_one_layout_and_loaded_at_another() -> None:
    cases = default_cases(checkpoint="ck")
    saved: dict[str, Case] = {}
    for case in cases:
        assert not case.load or case.load in saved, "what is loaded is saved before"
        saved |= {case.save: case} if case.save else {}
    pairs = [(saved[case.load], case) for case in cases if case.load]
    assert any(one.layout == other.layout for one, other in pairs), "streams of random numbers go on"
    assert sum(one.layout != other.layout for one, other in pairs) > len(pairs) / 2
    assert any(case.load and case.save for case in cases)
    ends = [case for pair in pairs for case in pair]
    for word in ("mode", "dtype", "master", "optimizer", "zero"):
        assert {getattr(case, word) for case in ends} == {getattr(case, word) for case in cases}, word
    for word in (*Case().mesh, "ep", "wp", "shard", "chunks", "first_layers", "experts", "kv_lora_rank", "scaler"):
        assert len({getattr(case, word) for case in ends}) > 1, word
    alone = default_cases()
    assert len(cases) - len(alone) == len(pairs) and not any(case.save or case.load for case in alone)
    refused = default_cases(refuses=lambda case: "not loaded" if case.load == "ck/scale" else "", checkpoint="ck")
    assert {case.load for case in cases} - {case.load for case in refused} == {"ck/scale", "ck/scale/again"}


def test_the_list_is_the_same_every_time_and_every_line_is_read_as_it_was_written() -> None:
    assert default_cases(["isp"]) == default_cases(["isp"])
    for case in (case for section in lines().values() for case in section):
        assert Case.of(**{**NUMBERS, **Case.read_words(line_of(case))}) == case


def test_a_repair_changes_words_as_rules_propose_and_nothing_that_is_fixed() -> None:
    words = words_of(Case.parse("mode=tp tp=2"))
    found = repair_words(words, {"packed": True}, domains())
    assert found and {word for word in words if found[word] != words[word]} == {"packed", "delivery", "positions"}
    assert repair_words(words, {"packed": True, "delivery": "tensors"}, domains()) is None
    with pytest.raises(CaseError):
        Case(**{**words, "packed": True, "delivery": "tensors"})


@pytest.mark.deep("a minute: every legal pair is looked for in hundreds of cases")
def test_the_search_knows_no_pair_that_is_not_there() -> None:
    """The search joins two values with all that either needs, where rules, one word at a time, find no case."""
    kept, before = ([words_of(case) for case in lines()[section]] for section in ("recipes", "pairs"))
    search = Search(kept, [*before, *kept], 0)
    held = np.any([search.pairs.pairs_of(words) for words in (*kept, *before)], axis=0)
    lacking = np.argwhere(np.triu(search.wanted & ~held)).tolist()
    assert [(search.pairs.levels[one], search.pairs.levels[other]) for one, other in lacking] == []
