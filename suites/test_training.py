"""Training: losses and parameters of all steps are those of the dense model, and calls those of the closed form.

SGD shows wrong factors of gradients that Adam hides.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.suites.session.prover import Prover

OPTIMIZERS = (
    *({"optimizer": "sgd", "lr": lr, "clip": clip} for clip, lr in ((0.05, 1.0), (0.0, 1.0), (1000.0, 0.1))),
    *({"optimizer": "adamw", "lr": 0.01, "clip": clip} for clip in (0.0, 0.05, 1000.0)),
)
"""With a clip that binds, one that does not, and none."""
COMMUNICATION = ("ledger", "groups", "parallelism")
"""Clipping and sums of gradients have calls of their own."""
EXAMPLES = settings().max_examples


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_steps_of_the_optimizer(prover: Prover, mode: str, data: st.DataObject) -> None:
    words = data.draw(st.sampled_from(OPTIMIZERS), label="optimizer, clip and lr")
    words = words | {"steps": data.draw(st.sampled_from((2, 2, 2, 3)), label="steps")}
    case = prover.draw_case(data, mode, where_known=words)  # without these words: the subject's own optimizer
    prover.holds(case, "merge", "tokens", "forward", "update", "gradient_norm", *COMMUNICATION)
