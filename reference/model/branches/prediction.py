"""Prediction of further tokens (`reference.features.prediction`) in the dense model, after the decoder.

Letters as in `reference.model.layers`. Depth k (from 1) of D, in its own norms, projection and layer:

    x_k = final_norm(layer(eh_proj [enorm(embedding(tokens_k)) | hnorm(x_(k-1))])),  x_0 the decoder's normed output
    loss_k = cross entropy of head(x_k) against labels_k

tokens_k, positions_k, labels_k and mask_k are those k places ahead in the same document. Past its end, token, position
and mask are 0, and the label is ignored. A term of the summed loss is `weight / D * N / N_k * sum of mask_k *
loss_k` over the micro-batch. The counts N of the main loss and N_k of depth k are over the step, which divides by N.
"""

from dataclasses import replace

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.data.batches import Batch
from shardproof.reference.model import losses as loss
from shardproof.reference.model.decoder import Pass


def shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """Its parameters, in the order in which they are used."""
    found: dict[str, tuple[int, ...]] = {}
    for depth in range(case.prediction_depth):
        for leaf in ("enorm", "hnorm", "eh_proj", "layer", "final_norm"):
            name = f"prediction.{depth}.{leaf}"
            if leaf == "layer":
                found[name] = ()
                continue
            linear = leaf == "eh_proj"
            found[f"{name}.weight"] = (case.hidden, 2 * case.hidden) if linear else (case.hidden,)
            if case.bias if linear else case.norm == "layernorm":
                found[f"{name}.bias"] = (case.hidden,)
    return found


def ahead(batch: Batch, places: int) -> Batch:
    """The micro-batch with, for each token, what stands this many places ahead in its document."""
    length = batch.tokens.shape[1]
    ends = torch.tensor([length]) if batch.cu_seqlens is None else batch.cu_seqlens.cpu()[1:]
    here = torch.arange(length)
    last = ends[torch.searchsorted(ends, here, right=True)] - 1  # of the document
    inside = (here + places <= last).to(batch.tokens.device)
    there = (here + places).clamp(max=length - 1).to(batch.tokens.device)

    def move_rows(x_BS: Tensor, filled: int) -> Tensor:
        return x_BS[:, there].masked_fill(~inside, filled)

    return replace(
        batch,
        tokens=move_rows(batch.tokens, 0),
        positions=move_rows(batch.positions, 0),
        labels=move_rows(batch.labels, loss.IGNORED),
        loss_mask=move_rows(batch.loss_mask, 0),
    )


def forward(run: Pass, _layer: str, x_BSH: Tensor, visible_SS: Tensor) -> Tensor:
    """Add the loss terms of all depths to `run.beside`; return the hidden states of the last depth."""
    case, depths = run.case, run.case.prediction_depth
    main = sum(_count(batch) for batch in run.beside.step)
    head = run.weights["embedding.tokens.weight" if case.tied else "head.weight"]
    for depth in range(depths):
        name, moved = f"prediction.{depth}", ahead(run.batch, depth + 1)
        embedded_BSH = run.arithmetic.look_up(run.weights["embedding.tokens.weight"], moved.tokens)
        if case.positions == "learned":
            positions_SH = run.weights["embedding.positions.weight"]
            embedded_BSH = embedded_BSH + run.arithmetic.look_up(positions_SH, moved.positions)
        embedded_BSH = run.apply_dropout(f"{name}.embedding", embedded_BSH)
        both_BSE = torch.cat((run.norm(f"{name}.enorm", embedded_BSH), run.norm(f"{name}.hnorm", x_BSH)), -1)
        x_BSH = run.block(f"{name}.layer", run.linear(f"{name}.eh_proj", both_BSE), visible_SS)
        x_BSH = run.norm(f"{name}.final_norm", x_BSH)
        logits_BSV = run.arithmetic.linear(x_BSH, head, None)
        summed, _ = loss.summed_loss(logits_BSV, moved.labels, moved.loss_mask, case.label_smoothing)
        counted = sum(_count(ahead(batch, depth + 1)) for batch in run.beside.step)
        run.beside.losses.append(case.prediction_weight / depths * (main / counted if counted else 0) * summed)
    return x_BSH


def _count(batch: Batch) -> float:
    return float(loss.token_weights(batch.labels, batch.loss_mask).sum())
