"""What-ifs of modules beside torch's own functions, of ranges that are one row off beside parts that look rows up."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardproof.reference.case import Case
from shardproof.reference.data.batches import micro_batch
from shardproof.reference.data.packing import IGNORED
from shardproof.reference.model import layers
from shardproof.reference.model.parameters import full
from shardproof.reference.training import subject as dense
from shardproof.reference.what_ifs import slices
from shardproof.reference.what_ifs.modules import WHAT_IFS
from tests.reference.what_ifs import CPU, attended, broken, close, projected, through, weight

SIZES = "layers=1 hidden=16 heads=4 kv_heads=2 ffn=12 seq=8 vocab=264 batch=2 micro=1 steps=1 fuse_qkv=false bias=true"
ROPE = Case.parse(f"mode=tp tp=1 {SIZES} positions=rope norm=layernorm activation=gelu")
LEARNED = Case.parse(f"mode=tp tp=1 {SIZES} positions=learned norm=rmsnorm activation=swiglu fuse_mlp=false")
MODULES = [rule.id for rule in WHAT_IFS] + ["kv_order"]
WO, W2, FIRST_NORM = "act/layers.0.attention.wo", "act/layers.0.mlp.w2", "act/layers.0.attention_norm"


@pytest.fixture(scope="module")
def rope() -> dict[str, Tensor]:
    return broken(ROPE, *MODULES)


@pytest.fixture(scope="module")
def learned() -> dict[str, Tensor]:
    return broken(LEARNED, *MODULES, "positions_missing", "positions_shifted")


def test_only_activations_that_another_rule_reaches_are_told(rope: dict[str, Tensor]) -> None:
    assert {name.split("/")[1] for name in rope} == {"act"}
    assert not any(name.startswith("positions_") for name in rope)  # rotary scores depend on differences alone


def test_scores_and_what_is_seen(learned: dict[str, Tensor]) -> None:
    q, k, v = projected(LEARNED)
    dim, every = LEARNED.head_dim, torch.ones(LEARNED.seq, LEARNED.seq, dtype=torch.bool)
    close(learned[f"scores_scaled.width/{WO}"], attended(LEARNED, q, k, v, scale=1 / dim))
    close(learned[f"scores_scaled.not/{WO}"], attended(LEARNED, q, k, v, scale=1.0))
    close(learned[f"scores_scaled.hidden/{WO}"], attended(LEARNED, q, k, v, scale=LEARNED.hidden**-0.5))
    close(learned[f"later_seen.all/{WO}"], attended(LEARNED, q, k, v, seen=every))
    close(learned[f"later_seen.one/{WO}"], attended(LEARNED, q, k, v, seen=every.tril(1)))
    in_turn = [x.repeat(1, 1, 2, 1) for x in (k, v)]
    close(learned[f"kv_order.repeated1/{WO}"], attended(LEARNED, q, *in_turn))


def test_rotations(rope: dict[str, Tensor]) -> None:
    q, k, v = projected(ROPE)
    places = micro_batch(ROPE, 0, 0, 0).positions

    def turned(x: Tensor, base: float, sign: float, *, pairs: bool) -> Tensor:
        """By complex numbers: pair i is one number, turned by its angle."""
        half = x.shape[-1] // 2
        angle = sign * places[..., None] / base ** (torch.arange(half, dtype=torch.float64) / half)
        turn = torch.polar(torch.ones_like(angle), angle)[:, :, None]
        apart = x.unflatten(-1, (half, 2)) if pairs else torch.stack(x.chunk(2, -1), -1)
        found = torch.view_as_real(torch.view_as_complex(apart.contiguous()) * turn)
        return found.flatten(-2) if pairs else torch.cat(found.unbind(-1), -1)

    for reading, base, sign, pairs in (
        ("pairs", layers.ROTARY_BASE, 1.0, True),
        ("backwards", layers.ROTARY_BASE, -1.0, False),
        ("base500000", 500_000.0, 1.0, False),
    ):
        q_turned, k_turned = (turned(x, base, sign, pairs=pairs) for x in (q, k))
        close(rope[f"rotated_otherwise.{reading}/{WO}"], attended(ROPE, q_turned, k_turned, v))
    for reading, pair in (
        ("queries_alone", (turned(q, layers.ROTARY_BASE, 1.0, pairs=False), k)),
        ("keys_alone", (q, turned(k, layers.ROTARY_BASE, 1.0, pairs=False))),
    ):
        close(rope[f"rotated_otherwise.{reading}/{WO}"], attended(ROPE, *pair, v))


def test_norms(rope: dict[str, Tensor], learned: dict[str, Tensor]) -> None:
    x = dense.true_activations(ROPE, CPU)["act/embedding"]
    w, b = (weight(ROPE, f"layers.0.attention_norm.{kind}") for kind in ("weight", "bias"))
    close(rope[f"other_epsilon.0.001/{FIRST_NORM}"], functional.layer_norm(x, x.shape[-1:], w, b, 1e-3))
    close(rope[f"normed_otherwise.left_out/{FIRST_NORM}"], x)
    close(rope[f"normed_otherwise.unweighted/{FIRST_NORM}"], functional.layer_norm(x, x.shape[-1:], None, b, 1e-5))
    close(rope[f"normed_otherwise.other_centre/{FIRST_NORM}"], functional.rms_norm(x, x.shape[-1:], w, 1e-5) + b)
    x = dense.true_activations(LEARNED, CPU)["act/embedding"]
    w = weight(LEARNED, "layers.0.attention_norm.weight")
    close(learned[f"normed_otherwise.weight_less_one/{FIRST_NORM}"], functional.rms_norm(x, x.shape[-1:], 1 + w, 1e-5))
    close(learned[f"normed_otherwise.other_centre/{FIRST_NORM}"], functional.layer_norm(x, x.shape[-1:], w, None, 1e-5))


def test_norms_over_heads_alone() -> None:
    case = LEARNED.but(qk_norm=True)
    found, (q, k, v) = broken(case, "normed_otherwise"), projected(case)
    close(found[f"normed_otherwise.heads_left_out/{WO}"], attended(case, q, k, v))


@pytest.mark.parametrize(
    ("reading", "nonlinearity"),
    [
        ("gelu_by_erf", functional.gelu),
        ("relu", torch.relu),
        ("relu_squared", lambda x: torch.relu(x) ** 2),
        ("gelu_by_sigmoid", lambda x: x * torch.sigmoid(1.702 * x)),
    ],
)
def test_nonlinearities(
    rope: dict[str, Tensor], learned: dict[str, Tensor], reading: str, nonlinearity: Callable[[Tensor], Tensor]
) -> None:
    for case, found in ((ROPE, rope), (LEARNED, learned)):
        acts = dense.true_activations(case, CPU)
        inner = nonlinearity(acts["act/layers.0.mlp.w1"])
        if case is LEARNED:
            inner = inner * acts["act/layers.0.mlp.w3"]
        close(found[f"other_activation.{reading}/{W2}"], through(case, "mlp.w2", inner))


def test_residuals_and_positions(learned: dict[str, Tensor]) -> None:
    acts = dense.true_activations(LEARNED, CPU)
    close(learned["term_missing.mlp/act/layers.0"], acts["act/layers.0.mlp"])
    alone, w = acts["act/layers.0.attention"], weight(LEARNED, "layers.0.mlp_norm.weight")
    for reading in ("attention", "attention_mlp"):
        normed = functional.rms_norm(alone, alone.shape[-1:], w, 1e-5)
        close(learned[f"term_missing.{reading}/act/layers.0.mlp_norm"], normed)
    batch, table = micro_batch(LEARNED, 0, 0, 0), weight(LEARNED, "embedding.positions.weight")
    tokens = weight(LEARNED, "embedding.tokens.weight")[batch.tokens]
    close(learned["positions_missing.table/act/embedding"], tokens)
    close(learned["positions_shifted.1/act/embedding"], tokens + table[[1, 2, 3, 4, 5, 6, 7, 7]])
    close(learned["positions_shifted.-1/act/embedding"], tokens + table[[0, 0, 1, 2, 3, 4, 5, 6]])


def test_an_mlp_that_reads_what_attention_read(rope: dict[str, Tensor]) -> None:
    """The norm before the MLP is that before attention but for its weights, and both branches are added."""
    reading, acts = "term_missing.to_what_the_mlp_reads_alone", dense.true_activations(ROPE, CPU)
    first = acts["act/embedding"]
    normed = functional.layer_norm(
        first, first.shape[-1:], weight(ROPE, "layers.0.mlp_norm.weight"), weight(ROPE, "layers.0.mlp_norm.bias"), 1e-5
    )
    close(rope[f"{reading}/act/layers.0.mlp_norm"], normed)
    branches = acts["act/layers.0.attention"] + rope[f"{reading}/act/layers.0.mlp"]
    close(rope[f"{reading}/act/layers.0"], first + branches)


PARTS = 2
CASE = Case.parse(
    f"mode=tp tp={PARTS} layers=1 hidden=16 heads=4 ffn=12 vocab=264 seq=16 batch=4 micro=1 steps=1 label_smoothing=0.1"
)
READINGS: dict[str, tuple[Callable[[Tensor, int], Tensor], Callable[[Tensor, int], Tensor]]] = {
    "without_last": (lambda place, size: (place >= 0) & (place < size - 1), lambda place, size: place),
    "without_first": (lambda place, size: (place > 0) & (place < size), lambda place, size: place),
    "and_after": (lambda place, size: (place >= 0) & (place <= size), lambda place, size: place.clamp(max=size - 1)),
    "and_before": (lambda place, size: (place >= -1) & (place < size), lambda place, size: place.clamp(min=0)),
}
"""Reading -> which places a part takes for its own, and the row that it reads for each."""


@pytest.fixture(scope="module")
def found() -> dict[str, Tensor]:
    return broken(CASE, "edge_off")


@pytest.mark.parametrize("reading", READINGS)
def test_rows_of_a_table(found: dict[str, Tensor], reading: str) -> None:
    own, row = READINGS[reading]
    batch, table = micro_batch(CASE, 0, 0, 0), full(CASE, "embedding.tokens.weight").double()
    table = torch.cat([table, torch.zeros(CASE.padded_vocab - CASE.vocab, CASE.hidden, dtype=torch.float64)])
    size = len(table) // PARTS
    total = full(CASE, "embedding.positions.weight").double()[batch.positions]
    for part in range(PARTS):
        place = batch.tokens - part * size
        rows = table[part * size :][:size][row(place, size).clamp(0, size - 1)]
        total = total + rows * own(place, size)[..., None]
    torch.testing.assert_close(found[f"edge_off.rows_{reading}_{PARTS}/act/embedding"], total)
    assert not torch.equal(total, dense.true_activations(CASE, CPU)["act/embedding"])  # the data meet both edges


@pytest.mark.parametrize("reading", READINGS)
def test_labels(found: dict[str, Tensor], reading: str) -> None:
    own, row = READINGS[reading]
    batch, logits = micro_batch(CASE, 0, 0, 0), dense.truth(CASE, CPU)["logits/0"]
    counts, columns = batch.loss_mask.double() * (batch.labels >= 0), CASE.padded_vocab // PARTS
    x, hit = logits - logits.amax(-1, keepdim=True), torch.zeros_like(batch.labels, dtype=torch.float64)
    for part in range(PARTS):
        size = min(columns, CASE.vocab - part * columns)
        place = batch.labels - part * columns
        mine = x[..., part * columns :][..., :size].gather(-1, row(place, size).clamp(0, size - 1)[..., None])[..., 0]
        hit += mine * (own(place, size) & (batch.labels >= 0))
    spread = 0.1 / (CASE.vocab - 1)
    loss = x.exp().sum(-1).log() - (1 - 0.1 - spread) * hit - spread * x.sum(-1)
    torch.testing.assert_close(found[f"edge_off.labels_{reading}_{PARTS}/loss/0"], (loss * counts).sum() / counts.sum())


def test_the_last_token_taken_for_padding() -> None:
    case = CASE.but(label_smoothing=0.0)
    batch, logits = micro_batch(case, 0, 0, 0), dense.truth(case, CPU)["logits/0"][..., :-1]
    counts, others = (
        batch.loss_mask.double() * (batch.labels >= 0),
        (batch.labels >= 0) & (batch.labels < case.vocab - 1),
    )
    x = logits - logits.amax(-1, keepdim=True)
    hit = x.gather(-1, batch.labels.where(others, 0)[..., None])[..., 0] * others
    loss = ((x.exp().sum(-1).log() - hit) * counts).sum() / counts.sum()
    torch.testing.assert_close(broken(case, "edge_off")["edge_off.last_token_out_2/loss/0"], loss)


SLICED = "mode=tp tp=1 heads=2 kv_heads=1 hidden=8 layers=1 seq=8 cp=2 batch=2"
ZIGZAG = [[0, 1, 6, 7], [2, 3, 4, 5]]
"""Tokens of the two ranks, of eight."""


def seen(case: Case, reading: str) -> Tensor:
    """Which key [of 8] each query [of 8] sees: values are unit vectors, so that the context is the shares."""
    zeros, unit = torch.zeros(1, 8, 1, 8), torch.eye(8)[None, :, None]
    attention = slices.masks(case)[reading]
    shares: Tensor = attention(zeros, zeros, unit, torch.ones(8, 8, dtype=torch.bool).tril())[0]
    return shares > 0


def test_masks_at_other_places() -> None:
    case = Case.parse(SLICED)
    own = {place: index for rank in ZIGZAG for index, place in enumerate(rank)}
    gathered = {place: index for index, place in enumerate(sum(ZIGZAG, []))}
    row = {place: place for place in range(8)}
    for reading, queries, keys in (
        ("mask_by_places_in_the_slice", own, own),
        ("mask_in_the_order_of_the_ranks", gathered, gathered),
        ("keys_in_the_order_of_the_ranks", row, gathered),
        ("queries_by_places_in_the_slice", own, row),
    ):
        by_hand = torch.tensor([[queries[q] >= keys[k] for k in range(8)] for q in range(8)])
        assert torch.equal(seen(case, reading), by_hand), reading


@pytest.mark.parametrize(
    ("words", "reading", "places"),
    [
        ("", "in_the_slice", [0, 1, 0, 1, 2, 3, 2, 3]),
        ("", "in_the_order_of_the_ranks", [0, 1, 4, 5, 6, 7, 2, 3]),
        ("cp_slices=contiguous", "of_zigzag_slices", [0, 1, 6, 7, 2, 3, 4, 5]),
    ],
)
def test_positions_of_other_places(words: str, reading: str, places: list[int]) -> None:
    case = Case.parse(f"{SLICED} {words}")
    feed = slices.other_positions(case)[f"positions_{reading}"]
    assert feed(case, 0, 0, 0, device=CPU).positions.tolist() == [places] * 2


def test_labels_shifted_in_a_slice() -> None:
    """Token 1 gets token 6, its neighbour in the slice, and tokens 7 and 5, the last ones, what the reading says."""
    case = Case.parse(SLICED)
    batch = micro_batch(case, 0, 0, 0)
    following = {0: 1, 1: 6, 6: 7, 2: 3, 3: 4, 4: 5}
    for reading, last in (
        ("kept", {7: batch.labels[:, 7], 5: batch.labels[:, 5]}),
        ("without_one", {7: torch.tensor([IGNORED] * 2), 5: torch.tensor([IGNORED] * 2)}),
        ("the_first_token", {7: batch.tokens[:, 0], 5: batch.tokens[:, 2]}),
    ):
        found = slices.other_labels(case)[f"last_{reading}"](case, 0, 0, 0, device=CPU).labels
        by_hand = torch.stack([last[p] if p in last else batch.tokens[:, following[p]] for p in range(8)], 1)
        assert torch.equal(found, by_hand.where(batch.labels != IGNORED, batch.labels))
    without = Case.parse("mode=tp tp=2")
    assert not slices.masks(without) | slices.other_positions(without) | slices.other_labels(without)
