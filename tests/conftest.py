"""What tests share: the embedded verifier, a slow tokenizer, and small artifacts."""

import importlib
import logging
from pathlib import Path

import numpy as np
import pytest

from common.config import VerifierSection
from common.embedded import embedded_verifier
from common.samples import Sample
from common.verifier import load_tokenizer, open_verifier

ROOT = Path(__file__).parent.parent
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def script(name: str):
    """A stage's module; its file name starts with a digit."""
    return importlib.import_module(name)


@pytest.fixture(autouse=True)
def _pipeline_logs_reach_caplog(caplog):
    caplog.set_level(logging.INFO, logger="pipeline")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return embedded_verifier("embedded:smollm2-135m")


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2):
    return load_tokenizer(open_verifier(VerifierSection(path=str(smollm2))))


def make_sample(tokens: int, supervised: int, *, seed: int = 0, split: str = "train") -> Sample:
    """A sample whose last `supervised` tokens carry loss."""
    ids = np.random.default_rng(seed).integers(3, 1000, tokens).astype(np.int32)
    return Sample(ids, np.arange(tokens) >= tokens - supervised, f"c{seed}", split, "test")
