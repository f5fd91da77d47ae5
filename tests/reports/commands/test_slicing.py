"""`shardproof slice`: what it prints of OPT-125m, what it refuses, and a checkpoint cut and joined."""

import json

import pytest
import torch

from shardproof.parallel.communication import layout
from shardproof.parallel.slicing import checkpoint
from shardproof.parallel.slicing.slices import slices
from shardproof.parallel.slicing.words import Sliced
from tests.harness.command_line import CommandLine

SMALL = "family=opt hidden=24 heads=4 ffn=40 vocab=61 positions=11 tp=2"
OPT_125M = """\
attn_qkvw 768 x 2304 columns 0 0-383 768-1151 1536-1919 768 x 1152
1 384-767 1152-1535 1920-2303 768 x 1152
attn_qkvb 2304 elements 0 0-383 768-1151 1536-1919 1152
1 384-767 1152-1535 1920-2303 1152
attn_ow 768 x 768 rows 0 0-383 384 x 768
1 384-767 384 x 768
attn_ob 768 all whole 768
inter_w 768 x 3072 columns 0 0-1535 768 x 1536
1 1536-3071 768 x 1536
inter_b 3072 elements 0 0-1535 1536
1 1536-3071 1536
output_w 3072 x 768 rows 0 0-1535 1536 x 768
1 1536-3071 1536 x 768
output_b 768 all whole 768
self_attn_layer_norm.weight 768 all whole 768
self_attn_layer_norm.bias 768 all whole 768
final_layer_norm.weight 768 all whole 768
final_layer_norm.bias 768 all whole 768
model.decoder.embed_tokens.weight 50272 x 768 all whole 50272 x 768
model.decoder.embed_positions.weight 2050 x 768 all whole 2050 x 768
model.decoder.final_layer_norm.weight 768 all whole 768
model.decoder.final_layer_norm.bias 768 all whole 768
lm_head.weight 50272 x 768 columns 0 0-383 50272 x 384
1 384-767 50272 x 384"""
"""Seed 004, by hand: qkv_size_per_partition = 768 // 2 * 3 = 1152, out_size_per_partition = 384.

Weights are [in, out]. strided_copy cuts [q | k | v] into three blocks of 768 columns and each block into pieces of
1152 // 3 = 384. A rank holds piece i of each. copy takes rows of the row linears, whose biases [768] are whole.
"""


def saved(*without: str) -> str:
    """A checkpoint of one layer of OPT in the current folder."""
    files = pytest.importorskip("safetensors.torch", reason="safetensors (extra `checkpoints`) is not installed")
    made = {one.name: one.place.shape for one in slices(Sliced.parse(f"{SMALL} path=autotp"))}
    tensors = {name: torch.randn(shape) for name, shape in made.items() if not name.startswith(without)}
    files.save_file(tensors, "model.safetensors")
    return "model.safetensors"


def test_it_prints_what_every_rank_holds(shardproof: CommandLine) -> None:
    status, out, err = shardproof("slice", "family=opt hidden=768 heads=12 tp=2")
    assert (status, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    first = lines.index(next(line for line in lines if line.startswith("attn_qkvw")))
    for found, line in zip(lines[first:], OPT_125M.splitlines(), strict=False):
        assert found.startswith(line), (found, line)
    assert "self_attn.q_proj.weight + self_attn.k_proj.weight + self_attn.v_proj.weight" in lines[first]
    assert lines[first].count("its piece of each part: 384 + 384 + 384") == 1
    words = ("family=llama", "hidden=64 heads=8", "kv_heads=2", "tp=3", "spare=empty")
    status, out, _ = shardproof("slice", *words)
    (row,) = [line.split() for line in out.splitlines() if line.strip().startswith("2 ") and "none" in line][:1]
    assert (status, row[:3]) == (0, ["2", "none", "0"]), "words may come apart, and ranks be empty"
    rule = "heads=12: must be a multiple of tp=5: a container gives every rank an equal share;"
    assert f"slice 'family=opt heads=12 tp=5': {rule}" in shardproof.refused("slice", "family=opt heads=12 tp=5")


def test_json_has_the_ranges(shardproof: CommandLine) -> None:
    status, out, _ = shardproof("slice", SMALL, "--json")
    told = json.loads(out)
    assert status == 0 and told["tp"] == 2 and "check" not in told
    tensors = {one["tensor"]: one for one in told["tensors"]}
    assert tensors["attn_qkvb"]["held"] == [[[0, 12], [24, 36], [48, 60]], [[12, 24], [36, 48], [60, 72]]]
    assert tensors["attn_ob"]["held"] is None and tensors["attn_ob"]["dim"] is None


def test_a_checkpoint_is_cut_and_joined(shardproof: CommandLine) -> None:
    file = saved()
    status, out, _ = shardproof("slice", SMALL, "--check", file)
    assert status == 0
    assert out.splitlines()[-1] == f"pass: 21 tensors of {file}, cut for 2 ranks and joined, are the same bit for bit"
    assert "note: " not in out
    told = json.loads(shardproof("slice", SMALL, "--check", file, "--json")[1])["check"]
    assert told == {"tensors": 21, "times": dict.fromkeys(told["times"], 1), "wrong": [], "left_out": []}
    out = shardproof("slice", SMALL, "--check", saved("lm_head"))[1]
    assert "note: not in the checkpoint: lm_head.weight\n" in out
    message = shardproof.refused("slice", SMALL, "--check", "gone.safetensors")
    assert "check=gone.safetensors: is no file; legal: check=model.safetensors" in message


def test_a_checkpoint_that_differs_ends_with_one(shardproof: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    real = layout.shard
    monkeypatch.setattr(checkpoint, "shard", lambda full, place, at: real(full, place, at) + (at["tp"][0] == 1))
    status, out, _ = shardproof("slice", SMALL, "--check", saved("self_attn.q", "self_attn.k", "self_attn.v"))
    assert status == 1
    told = out.splitlines()[-1].removeprefix("fail: not the same once joined: ")
    assert set(told.split(", ")) >= {"attn_ow", "attn_ob", "inter_w", "lm_head.weight"} and "attn_qkvw" not in told
