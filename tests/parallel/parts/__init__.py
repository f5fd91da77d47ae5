"""Experts, latent attention and predictions of further tokens, beside every other split."""
