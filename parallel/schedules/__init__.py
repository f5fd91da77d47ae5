"""Pipeline schedules as pure functions of pp, chunks and micro-batches: order, messages. No tensor."""
