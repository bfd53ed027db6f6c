"""Arctic backend: what runs in a training rank (imports nothing by itself; torch, transformers and
deepspeed only in its modules)."""
