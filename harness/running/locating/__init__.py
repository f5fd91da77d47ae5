"""One more run after a failure: which module is the first that differs, when no layout of activations is declared."""
