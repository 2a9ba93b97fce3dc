"""The TPU compiler takes the training step of examples/train_distributed.py apart for many chips that are not here."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

from aot_train_step import Case, in_own_process
from tpu.compile import libtpu_environment

pytestmark = [
    pytest.mark.aot,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install 'gated-delta[tpu]'"
    ),
]

MESHES = """
import sys
from jax.experimental import topologies
sys.path[:0] = sys.argv[1:]
import aot_train_step, train_distributed
for case in aot_train_step.CASES:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=case.topology).devices
    mesh = train_distributed.make_mesh(case.data, case.model, case.context, devices)
    assert mesh.devices.shape == (case.data, case.model, case.context) and set(mesh.devices.flat) == set(devices)
"""


def test_a_mesh_fits_every_topology():
    environment = {**os.environ, **libtpu_environment(pathlib.Path("/tmp")), "LIBTPU_INIT_ARGS": ""}
    folders = [str(pathlib.Path(__file__).parents[2] / name) for name in ("benchmarks", "examples")]
    done = subprocess.run([sys.executable, "-c", MESHES, *folders], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


SMALL = "--width 512 --head 64 --units 1 --length 2048".split()
MEMORY = {"tpu7x": 96, "v5p": 95}  # GiB of a device


@pytest.mark.parametrize(
    "case, chips",
    [
        (Case("tpu7x:2x2x1", data=2, model=2, context=2), 4),
        (Case("tpu7x:2x2x2", data=4, model=2, context=2), 8),
        (Case("tpu7x:4x4x4", data=32, model=2, context=2, options=["--fsdp"]), 64),
        (Case("v5p:4x4x4", data=16, model=2, context=2, options=["--fsdp"]), 64),
    ],
    ids=lambda x: getattr(x, "topology", ""),
)
@pytest.mark.parametrize("mixer", ["kda", "sla"])
def test_a_training_step_partitions(case, chips, mixer):
    found = in_own_process(case, mixer, layers=SMALL)
    chip = case.topology.partition(":")[0]
    assert found["devices"] == chips * (2 if chip == "tpu7x" else 1)
    assert found["arguments"] + found["temporary"] < MEMORY[chip] * 2**30
    sent = found["collectives"]
    assert sent["collective-permute"]["calls"] > 0  # states and windows, from one part of a sequence to the next
    assert sent["all-to-all"]["calls"] > 0  # softmax attention, between tokens and heads
    assert sent["all-reduce"]["calls"] > 0
    state = 12 * found["parameters"]  # float32: parameters and two moments
    assert found["arguments"] < (state / 16 if "--fsdp" in case.options else state) + 2**27
