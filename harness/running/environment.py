"""What a run ran on: versions, machine and command, for `env.json`. Sizes in bytes."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata

import torch

from harness.torch_internals.lookup import untested

_PACKAGES = ("shardproof", "torch", "numpy", "pandas", "nvtx", "hypothesis", "pytest", "transformers", "megatron-core")


def environment(command: Sequence[str], request: Mapping[str, object]) -> dict[str, object]:
    """A JSON object: command, request, start time, versions of the packages that matter, machine.

    `note` is there when this version of torch was not tested.
    """
    note = untested(torch.__version__)
    return {
        "command": list(command),
        "request": dict(request),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **({"note": note} if note else {}),
        "versions": {"python": platform.python_version(), **_versions()},
        "machine": {
            "platform": platform.platform(),
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
    }


def _versions() -> dict[str, str]:
    installed = {name: _version(name) for name in _PACKAGES}
    return {name: version for name, version in installed.items() if version}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
