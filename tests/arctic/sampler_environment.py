"""Sets what must be in the environment before torch and vllm are imported; imported first."""

import os

from backends.arctic.sampling.settings import CPU_ENVIRONMENT, ENVIRONMENT

os.environ.update(ENVIRONMENT)
os.environ.update(CPU_ENVIRONMENT)
os.environ.update(OMP_NUM_THREADS="1", VLLM_LOGGING_LEVEL="WARNING", DS_ACCELERATOR="cpu")
