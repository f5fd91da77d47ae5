"""The pipeline of a prediction as a frame: memory and bytes of every stage. Sizes are bytes."""

import pandas as pd

from shardproof.harness.predicting.figures import Forecast

PARTS = ("parameters", "gradients", "optimizer", "saved", "peak")
"""Parts of a rank's memory, and the most that all tensors hold at once."""


def rows_of_stages(forecast: Forecast) -> pd.DataFrame:
    """A row for every stage: stage, layers, live, the parts of its memory, what it sends, ledger.

    `live` are micro-batches in flight (of a chunk each). messages go to its neighbours. Missing where the subject
    states no closed form.
    """
    return pd.DataFrame(
        [
            {
                "stage": stage.index,
                "layers": stage.layers,
                "live": stage.live,
                **{f"{part}_bytes": getattr(stage.memory, part) for part in PARTS},
                "flops": stage.flops,
                "messages": sent.messages if (sent := stage.traffic) else None,
                "message_bytes": sent.message_bytes if sent else None,
                "wire_bytes": sent.wire_bytes if sent else None,
                "ledger": stage.ledger,
                "run_as_rank": stage.run,
            }
            for stage in forecast.stages
        ]
    )
