"""A CUDA graph that is played on the CPU: it has the methods of torch.cuda.CUDAGraph, and a replay runs a function.

A test puts it in torch's place before anything watches.
"""

from collections.abc import Callable


class SimulatedGraph:
    """Every replay runs the captured function again; on a GPU the kernels would run, without Python."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.run = run

    def capture(self) -> None:
        """Capture the function, as torch.cuda.graph does; here it is computed too."""
        self.capture_begin()
        self.run()
        self.capture_end()

    def capture_begin(self) -> None:
        """Torch's."""

    def capture_end(self) -> None:
        """Torch's."""

    def replay(self) -> None:
        self.run()
