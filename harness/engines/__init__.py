"""The ways of running ranks, one interface."""
