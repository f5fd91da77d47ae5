"""torch's hooks of a process through which values are recorded. Each asks for the recorder of its thread."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardproof.harness.programs.session import ProgramSession, ValueOptions, call_at_end
from shardproof.harness.programs.tensors import numerics
from shardproof.harness.programs.tensors.messages import watch_messages
from shardproof.harness.programs.tensors.names import Enclosing
from shardproof.harness.programs.tensors.recorder import ValueRecorder
from shardproof.harness.programs.tensors.updates import watch_clipping, watch_clipping_of_fsdp
from shardproof.harness.torch_internals.autograd import called_by, told_of_backward, told_of_replaced_results


class RecordingHooks:
    """The hooks of this process. `recorder_of` returns the recorder of the calling thread, None for a thread of no
    rank.
    """

    def __init__(self, recorder_of: Callable[[], ValueRecorder | None]) -> None:
        self._recorder_of = recorder_of
        self._on_calls = ExitStack()
        self._watches_fsdp = False

    def arm(self) -> None:
        """Record every module call, backward, clipping, message and optimizer step of this process from now on."""
        self._on_calls.enter_context(called_by(self._call))
        self._on_modules = register_module_forward_hook(self._on_output)
        register_optimizer_step_pre_hook(self._on_stepping)
        register_optimizer_step_post_hook(self._on_stepped)
        self._on_calls.enter_context(told_of_backward(self._on_backward))
        self._on_calls.enter_context(told_of_replaced_results(self._on_replaced))
        watch_clipping(self._on_clipping, self._on_norm)
        watch_messages(self._on_message)

    def watch_fsdp(self) -> None:
        """Record the clipping of FSDP1 too, if the program has imported it."""
        if not self._watches_fsdp:
            self._watches_fsdp = True
            watch_clipping_of_fsdp(self._on_clipping, self._on_norm)

    def leave_modules(self) -> None:
        """Stop recording the outputs of modules."""
        self._on_modules.remove()  # hooks of optimizers may be running, and torch does not copy their list

    def _call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder_of = self._recorder_of

        def call(module: nn.Module, *args: Any, **words: Any) -> Any:
            if (recorder := recorder_of()) is None:
                return original(module, *args, **words)
            return recorder.call(original, module, args, words)

        return call

    def _on_output(self, module: nn.Module, _args: object, output: object) -> None:
        if (recorder := self._recorder_of()) is not None:
            recorder.on_output(module, output)

    def _on_backward(self, tensors: Any, gradients: Any) -> None:
        if (recorder := self._recorder_of()) is not None:
            recorder.on_backward(tensors, gradients)

    def _on_replaced(self, result: Tensor) -> None:
        if (recorder := self._recorder_of()) is not None:
            recorder.on_replaced(result)

    def _on_stepping(self, optimizer: Any, args: tuple[Any, ...], words: dict[str, Any]) -> Any:
        recorder = self._recorder_of()
        return None if recorder is None else recorder.on_stepping(optimizer, args, words)

    def _on_stepped(self, _optimizer: Any, _args: object, _words: object) -> None:
        if (recorder := self._recorder_of()) is not None:
            recorder.on_stepped()

    def _on_clipping(self, parameters: list[Tensor]) -> None:
        if (recorder := self._recorder_of()) is not None:
            recorder.on_clipping(parameters)

    def _on_message(self, source: int) -> None:
        if (recorder := self._recorder_of()) is not None:
            recorder.on_message(source)

    def _on_norm(self, norm: object) -> None:
        if (recorder := self._recorder_of()) is not None:
            recorder.on_norm(norm)


def record_process(session: ProgramSession, options: ValueOptions) -> None:
    """Record this process as the rank that it turns out to be, until the interpreter ends."""

    def begin() -> None:
        hooks.watch_fsdp()
        call_at_end(recorder.end)

    numerics.change_process(options)
    numerics.change_thread(options)
    hooks = RecordingHooks(lambda: recorder)
    recorder = ValueRecorder(session, options, Enclosing(), begin, hooks.leave_modules)
    hooks.arm()
