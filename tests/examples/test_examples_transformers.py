"""The example of Hugging Face models gives eager attention's tokens, in the interpreter and on a GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rotation import some

EXAMPLE = Path(__file__).parents[2] / "examples" / "transformers"
MODELS = ("deepseek_v32", "deepseek_v3", "minicpm3")
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: pip install 'mlagen[transformers]'"
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def run(model: str, device: str) -> str:
    """The output of the example. It fails if a most likely token differs."""
    command = [sys.executable, EXAMPLE / "run.py", model, "--device", device]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_transformers
@pytest.mark.interpreter
@pytest.mark.parametrize("model", some(MODELS, 1))
def test_a_model_gives_the_tokens_of_eager_attention(model):
    assert ": equal:" in run(model, "cpu")


@needs_transformers
@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_a_model_gives_the_likely_tokens_of_eager_attention_on_a_gpu(model):
    assert "most likely token the same" in run(model, "cuda")  # generated tokens may part at ties, which differ by card
