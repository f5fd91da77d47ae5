"""The torchrun engine: ranks on one machine or many, in processes that a launcher started."""
