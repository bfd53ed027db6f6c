"""Arctic backend: what runs in a vLLM actor (imports nothing by itself; vllm and torch only in
its modules)."""
