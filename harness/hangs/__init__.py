"""After a hang: what every rank did last, by our recorder or NCCL's Flight Recorder, and where they diverge."""
