"""Arctic backend: how weights travel from trainer to sampler (imports nothing)."""
