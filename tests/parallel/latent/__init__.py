"""Latent attention: against the dense model, its ledger by the published table, rotary keys."""
