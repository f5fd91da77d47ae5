"""After a hang: what every rank did last, from our recorder's files or NCCL's Flight Recorder, and where they parted."""
