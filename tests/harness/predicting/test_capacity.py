"""A case that no machine can hold is refused before anything of it is allocated, and large ones still run on shapes."""

import math
from pathlib import Path

import pytest

from shardproof import prove
from shardproof.harness.errors import RequestError
from shardproof.harness.plain_case import Vocabulary
from shardproof.harness.running.ranks.capacity import admit
from shardproof.reference.case import Case
from shardproof.reference.model.parameters import shapes
from shardproof.reference.training.size import sizes_by_part, word_of_size
from tests.harness import own_words
from tests.harness.command_line import CommandLine
from tests.harness.proofs import ran

GIB = 2**30


@pytest.mark.parametrize(
    "words", ["micro=2000000000", "layers=999999999", "mode=isp preset=tiny-internlm2 seq=2000000000"]
)
def test_a_vast_case_is_refused_naming_its_word_and_a_legal_value(words: str, tmp_path: Path) -> None:
    key, _, value = words.rsplit(maxsplit=1)[-1].partition("=")
    legal = f"; legal: {key}={getattr(Case(), key)}, --engine dry, or shardproof predict"
    with pytest.raises(RequestError) as refused:
        ran(tmp_path, "shardproof.parallel.subject:subject", words)
    assert f": {key}={value}: dense model and data in float64 come to " in str(refused.value)
    assert str(refused.value).endswith(legal)
    assert not list(tmp_path.iterdir())


def test_the_sentence_has_the_numbers() -> None:
    case = Case.parse("vocab=1024 tied=true")
    with pytest.raises(RequestError) as refused:
        admit([case], "inproc", limit_bytes=2**20)
    # Weights: 1024 * 64 of tokens, 32 * 64 of positions, 128 of the last norm, and two blocks of 2 * 128 of norms,
    # 96 * 65 of queries, keys and values, 64 * 65, 256 * 65 and 64 * 257; four times. Attention: 2 * 2 * 8 * 32 * 32.
    # Logits: 64 * 1024. Data: 4 * 2 * 2 * 64.
    head = "case 'vocab=1024': dense model and data in float64 come to 0.00537 GiB (weights and gradients 0.00463, "
    tail = "attention 0.000244, logits 0.000488, data 7.63e-06), and this machine has 0.000977; legal: smaller sizes, "
    assert str(refused.value) == head + tail + "--engine dry, or shardproof predict"


@pytest.mark.parametrize(
    "words",
    [
        "mode=isp preset=tiny-internlm2",
        "layers=4 recompute=full recompute_layers=2",
        "pp=2 layers=4 micro=4 schedule=interleaved chunks=2 variant=two-stage-swap",
    ],
)
def test_weights_of_all_layers_are_counted_as_their_shapes_are(words: str) -> None:
    case = Case.parse(words)
    assert sizes_by_part(case)["weights and gradients"] == 4 * sum(map(math.prod, shapes(case).values()))


def test_shapes_alone_need_room_for_one_micro_batch() -> None:
    vast = [Case.parse(words) for words in ("preset=llama3-405b mode=tp-sp tp=8 dp=2048", "micro=2000000000")]
    admit(vast, "dry", limit_bytes=GIB)
    with pytest.raises(RequestError, match=r"seq=2000000000: its first micro-batch comes to 119 GiB "):
        admit([Case.parse("seq=2000000000")], "dry", limit_bytes=GIB)
    with pytest.raises(RequestError, match=r"'preset=llama3-405b': dense model .*; legal: smaller sizes, --engine dry"):
        admit([Case.parse("preset=llama3-405b")], "inproc", limit_bytes=64 * GIB)


def test_no_word_is_blamed_that_another_one_needs() -> None:
    case = Case.parse("tp=64 heads=64 kv_heads=64 hidden=1048576 ffn=1048576")
    assert word_of_size(case, GIB) is None


@pytest.mark.parametrize(
    ("words", "engine", "rule"),
    [
        ("tp=100000", "inproc", "tp=100000: comes to 100000 ranks, and engine inproc runs at most 4096 threads"),
        ("tp=2 dp=3000", "inproc", "dp=3000: comes to 6000 ranks, .*; legal: at most dp=2048, or --engine"),
        ("dp=999999 tp=999999 pp=999999", "pool", r"tp=999999: comes to \d+ ranks, .* processes .*; legal: smaller "),
    ],
)
def test_every_case_has_a_bound_on_its_ranks(words: str, engine: str, rule: str) -> None:
    own = Vocabulary.of(own_words.WORDS)
    with pytest.raises(RequestError, match=rule):
        admit([own.parse("tp=2"), own.parse(words)], engine)
    admit([own.parse("tp=2 dp=3"), Case.parse("mode=tp tp=2")], engine)
    admit([own.parse(words)], "dry")


def test_too_many_ranks_are_refused_before_the_truth_is_computed(shardproof_here: CommandLine) -> None:
    with pytest.raises(RequestError, match=r"dp=5000: .* legal: at most dp=4096, or --engine dry"):
        prove("dp=5000", own_words.subject)
    shardproof_here.refused("faults", "--subject", "tests.harness.own_words:subject", "tp=2 dp=5000")
