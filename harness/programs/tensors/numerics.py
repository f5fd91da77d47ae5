"""What `record --values` changes in a program's numbers on request: float64, no dropout, moved results.

Float64: the default dtype is float64, a narrower dtype that the program states (`.to(torch.bfloat16)`, `dtype=...`)
becomes float64, and autocast and mixed precision of FSDP are off. Floating inputs and parameters of other origin (from
files, from numpy) are converted at the first forward. What stays narrow is seen in the recorded rows.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode

from shardproof.harness.outcome.blocks import is_dtensor
from shardproof.harness.programs.session import ValueOptions
from shardproof.harness.torch_internals.compiler import run_eagerly
from shardproof.harness.torch_internals.dispatch import map_leaves
from shardproof.harness.torch_internals.world import redirect_function

_WIDE = torch.float64
_NARROW = frozenset((torch.float32, torch.bfloat16, torch.float16))
NARROW = frozenset(str(dtype).removeprefix("torch.") for dtype in _NARROW)
_CASTS = frozenset(("float", "half", "bfloat16"))
_AS_BITS = frozenset(("view", "frombuffer", "from_file"))
"""Functions whose dtype says how to read bits."""
_DROPOUTS = ("dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout")


def change_process(options: ValueOptions) -> None:
    """Make the changes that must be made before the program builds its model; torch has just been imported."""
    if options.dtype:
        torch.set_default_dtype(_WIDE)
        torch.set_default_dtype = lambda d: None  # noqa: ARG005  (torch's name)
        torch.Tensor.backward = _backward  # type: ignore[method-assign]
        vars(torch.autograd)["has_torch_function"] = _is_taken_over
        torch.autocast.__init__ = _disable(torch.autocast.__init__)  # type: ignore[method-assign]
        if torch.distributed.is_available():
            _widen_when_initialised()
    if not options.dropout:
        for name in _DROPOUTS:
            setattr(F, name, _keep)
        torch.dropout = _keep_all
        F.scaled_dot_product_attention = _attend


def change_thread(options: ValueOptions) -> None:
    """Make the changes that each thread that runs the program needs, after those of the process."""
    if options.dtype:
        _InFloat64().__enter__()


def begin_training(options: ValueOptions) -> None:
    """The first forward of training is about to begin."""
    run_eagerly()  # random draws of modules are seen only without torch.compile
    if options.perturb:
        from shardproof.harness.running.truth.random_rounding import RandomRounding  # noqa: PLC0415  (few recordings)

        kinds = (_WIDE, *_NARROW, torch.complex128, torch.complex64)
        units = {dtype: float(torch.finfo(dtype).eps) for dtype in kinds}
        RandomRounding(units, seed=options.perturb, inputs=False).__enter__()


def _widen_when_initialised() -> None:
    def init_process_group(original: Callable[..., Any], *args: Any, **words: Any) -> Any:
        result = original(*args, **words)
        _widen_policies()
        return result

    redirect_function(distributed_c10d.init_process_group, init_process_group).__enter__()


def _widen_policies() -> None:
    """Remove the dtypes from FSDP's policies of mixed precision."""
    from torch.distributed import fsdp  # noqa: PLC0415  (slow, and only float64 needs it)

    for kind in (fsdp.MixedPrecisionPolicy, fsdp.MixedPrecision):
        kind.__init__ = _without_dtypes(kind.__init__)  # type: ignore[method-assign]


def prepare_module(module: nn.Module, options: ValueOptions) -> None:
    """An outermost module is called for the first time."""
    for part in module.modules():
        if isinstance(part, nn.RNNBase) and not options.dropout:
            part.dropout = 0.0
    holders = [kind for part in module.modules() for kind in type(part).__mro__ if "Parallel" in kind.__name__]
    if options.dtype and not holders:  # DDP and FSDP1 have laid out their buffers in the dtype of the parameters
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.dtype in _NARROW and not is_dtensor(tensor):
                tensor.data = tensor.data.double()


def convert_call(
    module: nn.Module, args: Sequence[Any], words: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments of an outermost module, floating tensors in float64 if its parameters are."""
    first = next(module.parameters(), None)
    if first is None or first.dtype is not _WIDE:
        return args, words
    converted: tuple[Sequence[Any], Mapping[str, Any]] = map_leaves(_widen_tensor, (tuple(args), dict(words)))
    return converted


def _widen_tensor(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.dtype in _NARROW else value


class _InFloat64(TorchFunctionMode):
    """Inside, every dtype narrower than float64 that a torch function receives becomes float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The result of the function, in float64 if a narrower dtype was requested."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in _CASTS and len(args) == 1:
            return args[0].double()
        if name in _AS_BITS:
            return func(*args, **kwargs)
        if any(type(one) is torch.dtype and one in _NARROW for one in (*args, *kwargs.values())):
            args = tuple(_wide_dtype(one) for one in args)
            kwargs = {key: _wide_dtype(one) for key, one in kwargs.items()}
        return func(*args, **kwargs)


def _wide_dtype(one: Any) -> Any:
    return _WIDE if type(one) is torch.dtype and one in _NARROW else one


def _backward(
    tensor: Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    """Tensor.backward without __torch_function__ modes: torch would leave the mode of functions for all of backward."""
    torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


def _is_taken_over(tensors: Sequence[object]) -> bool:
    """Whether a tensor's own class overrides torch functions.

    This replaces torch.autograd's `has_torch_function`, which is true inside of a mode as well. torch would then leave
    the mode for the whole backward, and what is recomputed there would be narrow.
    """
    plain = (Tensor.__torch_function__, nn.Parameter.__torch_function__)  # these two override nothing
    return any(getattr(type(one), "__torch_function__", plain[0]) not in plain for one in tensors)


def _disable(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **words: Any) -> None:
        original(self, *args[:2], **{**words, "enabled": False})

    return init


def _without_dtypes(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, *_dtypes: Any, **words: Any) -> None:
        original(self, **{key: value for key, value in words.items() if not isinstance(value, torch.dtype)})

    return init


def _keep(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002, ARG001
    """Dropout that drops nothing, in words that TorchScript reads too."""
    return input


def _keep_all(input: Tensor, p: float, train: bool) -> Tensor:  # noqa: A002, ARG001
    return input


_attention = F.scaled_dot_product_attention


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention that drops nothing."""
    return _attention(
        query, key, value, attn_mask=attn_mask, dropout_p=0.0, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
