"""Pipeline schedules as pure functions of pp, chunks and micro-batches: order, messages, checks, timing. No tensor."""
