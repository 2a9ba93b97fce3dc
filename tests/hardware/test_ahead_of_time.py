"""The TPU compiler takes every kernel, forward and backward, at the shapes of real models, for chips that are not here.

libtpu needs no TPU for that, but a process of its own for each compilation. Neither kernel may take more of a chip's
vector memory than it has: the compiler refuses what does.
"""

import importlib.util
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from tpu.compile import CHIPS  # noqa: E402
from tpu.report import compiled  # noqa: E402

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install 'gated-delta[tpu]'"
    ),
]

CASES = {
    "GDN, Qwen3-Next, 16 key and 32 value heads": ("gdn_grouped", {}),
    "GDN, OLMo-Hybrid, 30 heads of 96 and 192": ("olmo", {}),
    "KDA, Kimi Linear, 32 heads": ("kda", {"heads": 32}),
    "KDA, bounded decays": ("kda", {"heads": 32, "log_decay_min": -5.0}),
    "GDN-2, 16 heads": ("gdn2", {}),
    "SLA-R4, 4 key heads": ("sla", {}),
    "SLA-R4, 4 key heads, approx": ("sla", {"inverse": "approx"}),
    "SLA-R4, 2 key heads": ("sla_2", {}),
    "SLA-R4, 8 key heads, approx": ("sla_8", {"inverse": "approx"}),
    "SLA-R8, the widest state": ("sla_r8", {}),
    "GDN, Qwen3-Next, packed documents": ("gdn_grouped", {"documents": True}),
    "KDA, Kimi Linear, packed documents": ("kda", {"heads": 32, "documents": True}),
    "SLA-R4, 4 key heads, packed documents": ("sla", {"documents": True}),
}


def kernels(case: str, chip: str, folder: pathlib.Path, **keywords) -> dict:
    """Compile forward and backward as one program; what JAX says of it."""
    name, own = CASES[case]
    function = f"{ROOT / 'benchmarks' / 'tpu' / 'ours.py'}:{name}"
    record = compiled(function, {**own, "backward": True, **keywords}, chip, folder)
    # Forward and backward, and where inputs are not finite a second forward, and both again for its gradient.
    assert record["hlo"].count('custom_call_target="tpu_custom_call"') == 5
    return record


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("case", CASES)
def test_the_kernels_compile(case, chip, tmp_path):
    kernels(case, chip, tmp_path)


CONVOLVED = {
    "GDN, Qwen3-Next, 16 key and 32 value heads": "gdn_grouped",
    "KDA, 16 heads": "kda",
    "SLA-R4, 4 key heads": "sla",
}


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("case", CONVOLVED)
def test_the_forward_kernel_compiles_with_convolutions(case, chip, tmp_path):
    function = f"{ROOT / 'benchmarks' / 'tpu' / 'ours.py'}:{CONVOLVED[case]}"
    record = compiled(function, {"raw": True, "conv": 4, "time": 2048}, chip, tmp_path)
    assert record["hlo"].count('custom_call_target="tpu_custom_call"') == 2  # and without what is not finite


def test_a_small_block_of_the_kernels_compiles(tmp_path):
    kernels("SLA-R4, 2 key heads", "tpu7x", tmp_path, time=256, config={"owners": 1, "chunks": 1})


STEPS = {
    "GDN, Qwen3-Next, 16 key and 32 value heads": {},
    "GDN, raw gates": {"raw": True},
    "GDN, OLMo-Hybrid, 30 heads of 96 and 192": {"kind": "olmo"},
    "KDA, Kimi Linear, 32 heads": {"kind": "kda"},
    "KDA, raw gates": {"kind": "kda", "raw": True},
    "GDN-2, 16 heads": {"kind": "gdn2"},
    "SLA-R4, 4 key heads": {"kind": "sla"},
    "GDN, states of bfloat16": {"state": "bfloat16"},
    "GDN, a state for each row, one of a half of the heads in a step": {"plain": True, "config": {"owners": 16}},
}


def step_kernel(chip: str, folder: pathlib.Path, **keywords):
    """The pool is read and written where it lies: beside it nothing of its size is held."""
    record = compiled(f"{ROOT / 'benchmarks' / 'tpu' / 'ours.py'}:step", keywords, chip, folder)
    assert record["hlo"].count('custom_call_target="tpu_custom_call"') == 1
    assert "output_to_operand_aliasing" in record["hlo"]
    assert record["temporary_bytes"] < record["output_bytes"] / 16


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("case", STEPS)
def test_the_decode_kernel_compiles(case, chip, tmp_path):
    step_kernel(chip, tmp_path, **STEPS[case])


def test_a_small_decode_kernel_compiles(tmp_path):
    step_kernel("tpu7x", tmp_path, batch=4)
