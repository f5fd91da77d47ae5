"""Location after a failure, by another run: the first module that differs when no layout of activations is declared."""
