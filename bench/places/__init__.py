"""How often a failure names the right module when the subject declares no layout of its activations."""
