"""Prediction of further tokens: against the dense model, limits, regrouping."""
