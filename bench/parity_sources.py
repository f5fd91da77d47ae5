"""Training programs of others for bench.parity_programs: what is changed so that they run on CPUs, and their launches.

Devices, sizes, and what a program would download are changed. SEED in a change is the number of a run.
"""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench import parity_trainers
from bench.parity_edits import (
    FSDP_EDITS,
    MINGPT_EDITS,
    NANOGPT_EDITS,
    PICOTRON_DP_EDITS,
    PICOTRON_PP_EDITS,
    PICOTRON_TP_EDITS,
    Edit,
    Substitution,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program: its folder in the sources ("": none), its script, added files, and its commands, "RANKS options"."""

    name: str
    folder: str = ""
    script: str
    changes: tuple[Substitution, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    prepare: tuple[Callable[[Path], object], ...] = ()
    first: str
    layouts: Mapping[str, str]
    same_init: bool = False
    dropout: bool = True
    edits: tuple[Edit, ...] = ()


_EXAMPLES_ON_CPUS: tuple[Substitution, ...] = (
    ("log_utils.py", "return has_gpu and gpu_count >= min_gpus", "return True"),
)


def _example(script: str, *changes: Substitution, edits: tuple[Edit, ...] = ()) -> Program:
    device = (script, "torch.accelerator.current_accelerator().type", '"cpu"; torch.manual_seed(SEED)')
    return Program(
        name=f"examples/{script.removesuffix('.py')}",
        folder="examples/distributed/tensor_parallelism",
        script=script,
        changes=(*_EXAMPLES_ON_CPUS, device, *changes),
        first="1",
        layouts={"tp2": "2", "tp4": "4"},
        same_init=True,
        edits=edits,
    )


TENSOR_PARALLEL = _example("tensor_parallel_example.py", ("tensor_parallel_example.py", "_world_size % 2 == 0", "True"))
FSDP_TENSOR_PARALLEL = _example(
    "fsdp_tp_example.py",
    ("fsdp_tp_example.py", "tp_size = 2", 'tp_size = int(os.environ["WORLD_SIZE"])'),
    (
        "fsdp_tp_example.py",
        "dim=256, n_layers=2, n_heads=16, vocab_size=32000",
        "dim=32, n_layers=2, n_heads=4, vocab_size=64",
    ),
    ("fsdp_tp_example.py", "torch.randint(32000, (8, 256)", "torch.randint(64, (2, 16)"),
    ("llama2_model.py", "multiple_of: int = 256", "multiple_of: int = 16"),
    (  # on CPUs torch has no rule for DTensors in its fused kernel
        "llama2_model.py",
        "        output = F.scaled_dot_product_attention(xq, xk, xv, is_causal=True)",
        "        from torch.distributed.tensor.experimental import implicit_replication\n"
        "        from torch.nn.attention import SDPBackend, sdpa_kernel\n"
        "        with sdpa_kernel(SDPBackend.MATH), implicit_replication():\n"
        "            output = F.scaled_dot_product_attention(xq, xk, xv, is_causal=True)",
    ),
    edits=FSDP_EDITS,
)

_MINGPT_WORDS = (
    "data_config.path=text.txt data_config.truncate=1.0 data_config.block_size=16 gpt_config.n_layer=2 "
    "gpt_config.n_head=2 gpt_config.n_embd=16 trainer_config.max_epochs=1 trainer_config.data_loader_workers=0 "
    "trainer_config.use_amp=False trainer_config.batch_size="
)
MINGPT = Program(
    name="examples/minGPT-ddp",
    folder="examples/distributed/minGPT-ddp/mingpt",
    script="main.py",
    changes=(
        ("main.py", "return has_gpu and gpu_count >= min_gpus", "return True"),
        # Its ranks set no seed, and split the data otherwise: FINDINGS.md.
        ("main.py", "acc = torch.accelerator.current_accelerator()", 'acc = "cpu"; torch.manual_seed(SEED)'),
        ("main.py", 'torch.device(f"{acc}:{rank}")', "torch.device(acc)"),
        ("main.py", "torch.accelerator.set_device_index(rank)", "pass"),
        ("trainer.py", 'torch.device(f"{self.acc}:{self.local_rank}")', 'torch.device("cpu")'),
        ("trainer.py", ".to(self.local_rank)", ".to(self.device)"),
        ("trainer.py", ", device_ids=[self.local_rank]", ""),
    ),
    files={"text.txt": "".join(random.Random(3).choices("abcdefghijklmnop", k=400))},
    first=f"1 {_MINGPT_WORDS}4",
    layouts={"ddp2": f"2 {_MINGPT_WORDS}2", "ddp4": f"4 {_MINGPT_WORDS}1"},
    dropout=False,
    edits=MINGPT_EDITS,
)


def _write_tokens(folder: Path) -> None:
    """Shards of tokens as build-nanogpt's fineweb.py writes them."""
    (folder / "edu_fineweb10B").mkdir()
    for seed, split in enumerate(("train", "val")):
        drawn = np.random.default_rng(seed).integers(0, 64, 4096).astype(np.uint16)
        np.save(folder / "edu_fineweb10B" / f"edufineweb_{split}_000000.npy", drawn)


NANOGPT = Program(
    name="build-nanogpt",
    folder="build-nanogpt",
    script="train_gpt2.py",
    changes=tuple(
        ("train_gpt2.py", old, new)
        for old, new in (
            ('assert torch.cuda.is_available(), "for now i think we need CUDA for DDP"', "pass"),
            ("backend='nccl'", "backend='gloo'"),
            ("device = f'cuda:{ddp_local_rank}'", "device = 'cpu'"),
            ("    torch.cuda.set_device(device)\n", ""),
            (", device_ids=[ddp_local_rank]", ""),
            ("op=dist.ReduceOp.AVG", "op=dist.ReduceOp.SUM"),
            ('tiktoken.get_encoding("gpt2")', "None"),
            ("if (step % 250 == 0 or last_step) and (not use_compile):", "if False:"),
            ("torch.manual_seed(1337)", "torch.manual_seed(1337 + SEED)"),
            ("total_batch_size = 524288", "total_batch_size = 128"),
            ("B = 64", "B = 2"),
            ("T = 1024", "T = 16"),
            ("block_size: int = 1024", "block_size: int = 16"),
            ("n_layer: int = 12", "n_layer: int = 2"),
            ("n_head: int = 12", "n_head: int = 2"),
            ("n_embd: int = 768", "n_embd: int = 32"),
            ("GPTConfig(vocab_size=50304)", "GPTConfig(vocab_size=64)"),
        )
    )
    + (("hellaswag.py", 'tiktoken.get_encoding("gpt2")', "None"),),
    prepare=(_write_tokens,),
    first="0",
    layouts={"ddp2": "2", "ddp4": "4"},
    edits=NANOGPT_EDITS,
)

_WORDS = [f"w{number}" for number in range(62)]
_TOKENIZER: Mapping[str, object] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "post_processor": None,
    "decoder": None,
    "model": {
        "type": "WordLevel",
        "vocab": {w: n for n, w in enumerate(["<unk>", "<pad>", *_WORDS])},
        "unk_token": "<unk>",
    },
}
_LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
_FLASH = {
    "flash_attn/__init__.py": "",
    "flash_attn/layers/__init__.py": "",
    "flash_attn/ops/__init__.py": "",
    "flash_attn/ops/triton/__init__.py": "",
    "flash_attn/flash_attn_interface.py": """import torch.nn.functional as F
def flash_attn_func(q, k, v, causal):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
""",
    "flash_attn/layers/rotary.py": """import torch
def apply_rotary_emb(x, cos, sin, interleaved):
    cos, sin = cos[None, :, None].to(x.dtype), sin[None, :, None].to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
""",
    "flash_attn/ops/triton/layer_norm.py": """import torch.nn.functional as F
def layer_norm_fn(x, weight, bias, residual=None, eps=1e-5, is_rms_norm=True, **words):
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
""",
}
"""Stand-ins on a CPU for the functions of flash_attn that picotron calls."""
_TINY = {
    "tiny/config.json": json.dumps(_LLAMA),
    "tiny/tokenizer.json": json.dumps(_TOKENIZER),
    "tiny/tokenizer_config.json": json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "w0"}
    ),
}
_PICOTRON_FILES = {
    **_FLASH,
    "wandb.py": "",
    "lovely_tensors.py": "def monkey_patch(): pass\n",
    **_TINY,
    "stories/train.jsonl": "\n".join(
        json.dumps({"text": " ".join(random.Random(number).choices(_WORDS, k=17))}) for number in range(40)
    ),
}
_PICOTRON_CHANGES: tuple[Substitution, ...] = (
    ("train.py", 'backend = "nccl"', 'backend = "gloo"'),
    ("train.py", "torch.cuda.set_device(local_rank)", ""),
    ("train.py", 'torch.device("cuda", local_rank)', 'torch.device("cpu")'),
    ("train.py", "dtype = torch.bfloat16", "dtype = torch.float32"),
    ("train.py", "torch.cuda.memory_reserved()", "0"),
    ("train.py", "op=dist.ReduceOp.AVG", "op=dist.ReduceOp.SUM"),
    ("model.py", "torch.device('cuda')", "torch.device('cpu')"),
    ("model.py", "dtype = torch.bfloat16", "dtype = torch.float32"),
    ("model.py", "config.rope_theta", "10000.0"),
    ("data_parallel.py", "device='cuda'", "device='cpu'"),
    ("pipeline_parallel.py", "torch.cuda.synchronize()", ""),
    ("dataloader.py", "tokenizer.batch_encode_plus(", "tokenizer("),
)
_PICOTRON = (
    "--model_name tiny --dataset_name stories --num_hidden_layers 2 --num_attention_heads 4 --num_key_value_heads 4 "
    "--num_workers 0 --num_proc 1 --seq_len 16 --max_tokens 256 --seed 4SEED"  # 40, 41, ...
)


def _picotron(name: str, layouts: Mapping[str, str], *, same_init: bool, edits: tuple[Edit, ...] = ()) -> Program:
    return Program(
        name=f"picotron_tutorial/{name}",
        folder="picotron_tutorial/step8_pipeline_parallel_1f1b",
        script="train.py",
        changes=_PICOTRON_CHANGES,
        files=_PICOTRON_FILES,
        first=f"1 {_PICOTRON} --micro_batch_size 4",
        layouts={
            layout: f"{words.partition(' ')[0]} {_PICOTRON} {words.partition(' ')[2]}"
            for layout, words in layouts.items()
        },
        same_init=same_init,
        edits=edits,
    )


PICOTRON_TP = _picotron(
    "tp",
    {"tp2": "2 --tp_size 2 --micro_batch_size 4", "tp2dp2": "4 --tp_size 2 --dp_size 2 --micro_batch_size 2"},
    same_init=True,
    edits=PICOTRON_TP_EDITS,
)
PICOTRON_DP = _picotron(
    "dp",
    {
        "dp2": "2 --dp_size 2 --micro_batch_size 2",
        "dp2 accumulated": "2 --dp_size 2 --micro_batch_size 1 --gradient_accumulation_steps 2",
    },
    same_init=False,
    edits=PICOTRON_DP_EDITS,
)
PICOTRON_PP = _picotron(
    "pp",
    {
        "afab": "2 --pp_size 2 --micro_batch_size 4",
        "1f1b": "2 --pp_size 2 --micro_batch_size 4 --pp_engine 1f1b",
        "dp2pp2": "4 --pp_size 2 --dp_size 2 --micro_batch_size 2 --pp_engine 1f1b",
    },
    same_init=False,
    edits=PICOTRON_PP_EDITS,
)


def _on_cpu(run: str, *, available: bool, first: str = "") -> str:
    """A script that runs a program of CUDA on the CPU, which answers for CUDA; torch.compile compiles nothing."""
    return f"""import os, runpy, sys, sysconfig
os.environ["TORCHDYNAMO_DISABLE"] = "1"
{first}
from shardproof import cuda_on_cpu
with cuda_on_cpu(available={available}):
    runpy.{run}, run_name="__main__")
"""


_TITAN_WORDS = (
    "--module llama3 --config llama3_debugmodel --debug.seed 4SEED --training.disable_cuda_graphs "
    "--training.mixed_precision_param float32 --parallelism.spmd_backend partial_dtensor --training.seq_len 16 "
    "--training.steps 4 --training.local_batch_size "
)
_FLEX = """import torch.nn.functional as F
from torch.nn.attention.flex_attention import AuxOutput, create_mask
def flex_attention(q, k, v, *, block_mask, scale, enable_gqa, **words):
    mask = create_mask(block_mask.mask_mod, *block_mask.shape[:2], q.shape[2], k.shape[2], device="cpu")
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa), AuxOutput()
"""
"""A stand-in for torch's flex_attention, which has no backward on a CPU."""
TORCHTITAN = Program(
    name="torchtitan",
    folder="torchtitan",
    script="on_cpu.py",
    changes=(
        ("torchtitan/tools/utils.py", '= _get_available_device_type() or "cuda"', '= "cpu"'),
        ("torchtitan/tools/utils.py", "_get_device_module(device_type)", '_get_device_module("cuda")'),
        (  # torch 2.13 has no such function
            "torchtitan/distributed/utils.py",
            "torch.distributed.set_timeout(timeout, group)",
            "pass",
        ),
        (
            "torchtitan/models/common/attention.py",
            "torch.compile(\n        flex_attention,\n        options=inductor_configs,\n    )",
            '__import__("flex_on_cpu").flex_attention',
        ),
        *(
            ("torchtitan/models/llama3/__init__.py", old, new)
            for old, new in (
                ("    dim = 256\n", "    dim = 32\n"),
                ("    n_heads = 16\n", "    n_heads = 4\n"),
                ("    n_layers = 6\n", "    n_layers = 2\n"),
                ("=2048", "=64"),
            )
        ),
        (  # Each rank reads the documents of a part of the file, so that two ranks read another batch than one.
            "torchtitan/hf_datasets/text_datasets.py",
            "split_dataset_by_node(ds, dp_rank, dp_world_size)",
            "ds.shard(dp_world_size, dp_rank, contiguous=False)",
        ),
    ),
    files={
        "on_cpu.py": _on_cpu('run_module("torchtitan.train"', available=False),
        "flex_on_cpu.py": _FLEX,
        **{f"tests/assets/tokenizer/{name.partition('/')[2]}": text for name, text in _TINY.items()},
        "tests/assets/c4_test/data.json": "\n".join(
            json.dumps({"text": " ".join(random.Random(number).choices(_WORDS, k=16))}) for number in range(40)
        ),
    },
    first=f"1 {_TITAN_WORDS}4",
    layouts={"fsdp2": f"2 {_TITAN_WORDS}2", "tp2": f"2 {_TITAN_WORDS}4 --parallelism.tensor_parallel_degree 2"},
    same_init=True,
)

_GPT_WORDS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 62 --make-vocab-size-divisible-by 1 --global-batch-size 4 "
    "--train-iters 4 --lr 1e-3 --eval-iters 0 --eval-interval 100 --attention-dropout 0 --hidden-dropout 0 "
    "--distributed-backend gloo --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion "
    "--seed 4SEED --micro-batch-size "
)
_MEGATRON_NEEDS = """os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
os.environ["MAKEFLAGS"] = "LIBEXT=" + sysconfig.get_config_var("EXT_SUFFIX")
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
"""
"""Megatron-LM compiles a module for the Python that is first in PATH, and asks for the variable of CUDA."""
PRETRAIN_GPT = Program(
    name="Megatron-LM/pretrain_gpt",
    folder="Megatron-LM",
    script="on_cpu.py",
    changes=(
        *(  # for Python 3.11
            (f"megatron/training/models/{file}.py", ", override\n", "\nfrom typing_extensions import override\n")
            for file in ("gpt", "hybrid")
        ),
        (  # gradients are float64 here
            "megatron/core/optimizer/clip_grads.py",
            "assert param.grad.type() == 'torch.cuda.FloatTensor'",
            "assert param.grad.is_floating_point()",
        ),
    ),
    files={"on_cpu.py": _on_cpu('run_path("pretrain_gpt.py"', available=True, first=_MEGATRON_NEEDS)},
    first=f"1 {_GPT_WORDS}4",
    layouts={
        "tp2": f"2 {_GPT_WORDS}4 --tensor-model-parallel-size 2",
        "dp2": f"2 {_GPT_WORDS}2",
        "pp2": f"2 {_GPT_WORDS}2 --pipeline-model-parallel-size 2",
        "dp2tp2": f"4 {_GPT_WORDS}2 --tensor-model-parallel-size 2",
    },
    same_init=True,
)


def _library(name: str, script: str, launcher: str = "", **more: Any) -> Program:
    """A script of bench.parity_trainers. Its arguments are the rows of a rank and how many batches are accumulated.

    `launcher` starts the first launch only: accelerate's starts no two processes without a GPU or MPI.
    """
    return Program(
        name=name,
        script="train.py",
        files={**_TINY, "train.py": script},
        first=f"{launcher}1 4 1",
        layouts={"ddp2": "2 2 1", "ddp2 accumulated": "2 1 2"},
        **more,
    )


TRAINER = _library("transformers.Trainer", parity_trainers.TRAINER)
PEFT = _library("peft", parity_trainers.PEFT)
ACCELERATE = _library("accelerate", parity_trainers.ACCELERATE, "accelerate:")
TRL = _library("trl.SFTTrainer", parity_trainers.TRL)

PROGRAMS = (
    TENSOR_PARALLEL,
    FSDP_TENSOR_PARALLEL,
    MINGPT,
    NANOGPT,
    PICOTRON_TP,
    PICOTRON_DP,
    PICOTRON_PP,
    TORCHTITAN,
    PRETRAIN_GPT,
    TRAINER,
    PEFT,
    ACCELERATE,
    TRL,
)
