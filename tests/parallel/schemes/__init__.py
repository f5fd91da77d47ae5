"""Tests of the modes of `parallel`: expectations, tables, variants, planted bugs."""
