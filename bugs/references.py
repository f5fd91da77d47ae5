"""Public issues and pull requests that a record names: the words that it stands for, read.

A reference is `SYSTEM #N`, `SYSTEM PR #N` or item `-M` of issue N, several joined by ", #N" or " and #N"; `SYSTEM` is
one of SYSTEMS. An issue that is only resembled has "kin" behind it (`Megatron #656's kin`), and is no reference.
"""

import re

SYSTEMS = {
    "Megatron": "NVIDIA/Megatron-LM",
    "Megatron-LM": "NVIDIA/Megatron-LM",
    "ML": "NVIDIA/Megatron-LM",
    "radixark Megatron": "radixark/Megatron-LM",
    "BigScience": "bigscience-workshop/Megatron-DeepSpeed",
    "TE": "NVIDIA/TransformerEngine",
    "ROCm TE": "ROCm/TransformerEngine",
    "NeMo": "NVIDIA-NeMo/NeMo",
    "NeMo-RL": "NVIDIA-NeMo/RL",
    "NeMo Automodel": "NVIDIA-NeMo/Automodel",
    "torchtitan": "pytorch/torchtitan",
    "TT": "pytorch/torchtitan",
    "PyTorch": "pytorch/pytorch",
    "DeepSpeed": "deepspeedai/DeepSpeed",
    "transformers": "huggingface/transformers",
    "accelerate": "huggingface/accelerate",
    "diffusers": "huggingface/diffusers",
    "picotron": "huggingface/picotron",
    "gpt-neox": "EleutherAI/gpt-neox",
    "ColossalAI": "hpcaitech/ColossalAI",
    "InternEvo": "InternLM/InternEvo",
    "InternLM": "InternLM/InternLM",
    "ms-swift": "modelscope/ms-swift",
    "verl": "verl-project/verl",
    "SkyRL": "NovaSky-AI/SkyRL",
    "VeOmni": "ByteDance-Seed/VeOmni",
    "apple ml-cross-entropy": "apple/ml-cross-entropy",
    "PaddleFleet": "PaddlePaddle/PaddleFleet",
    "PaddleFleetX": "PaddlePaddle/PaddleFleetX",
    "fastmoe": "laekov/fastmoe",
    "slime": "THUDM/slime",
    "trl": "huggingface/trl",
    "vllm": "vllm-project/vllm",
    "vllm-gguf-plugin": "vllm-project/vllm-gguf-plugin",
    "prime-rl": "PrimeIntellect-ai/prime-rl",
    "mcore-bridge": "modelscope/mcore-bridge",
    "Megatron-Bridge": "NVIDIA-NeMo/Megatron-Bridge",
}
"""Name of a system in a record -> its repository."""
_NAMES = "|".join(sorted(map(re.escape, SYSTEMS), key=len, reverse=True))
_NUMBER = r"#\d+(?:-\d+)?"
_NAMED = re.compile(rf"(?<![\w-])({_NAMES}) ?(?:PR )?({_NUMBER}(?:(?:, | and ){_NUMBER})*)('s kin| and its kin)?")


def references(stands_for: str) -> tuple[str, ...]:
    """The references of a record as REPOSITORY#N, in its order."""
    found = (
        f"{SYSTEMS[named[1]]}#{number}"
        for named in _NAMED.finditer(stands_for)
        if not named[3]
        for number in re.findall(r"#(\d+)", named[2])
    )
    return tuple(dict.fromkeys(found))


def unread(stands_for: str) -> tuple[str, ...]:
    """Numbers in the words of a record that belong to no system of SYSTEMS and have no "kin" behind them: nothing reads
    them.
    """
    return tuple(re.findall(r"#\d+", _NAMED.sub("", stands_for)))


def defect(stands_for: str) -> str:
    """The words of a record after its references: what went wrong. All of its words if it has no reference."""
    *_, end = (0, *(named.end() for named in _NAMED.finditer(stands_for)))
    return stands_for[end:].strip(" ,:;()")
