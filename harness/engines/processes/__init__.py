"""The engines whose ranks are processes: `forked` on this machine (the pool), `launched` by torchrun or SLURM."""
