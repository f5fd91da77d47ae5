"""Prediction of further tokens behind the decoder: `depths`, its modules, `ahead`, its data, and `scheme`."""
