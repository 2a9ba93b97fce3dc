"""How every test runs: strict dtype promotion, type checks of our own code, hypothesis profiles, 8 CPU devices."""

import gc
import importlib.util
import os
import sys
from importlib.metadata import version
from pathlib import Path

if version("jaxlib").startswith("0.10"):
    # Compiles small float32 problems 2 times faster. From 0.11 on the flag is unknown and would abort.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false".strip()

import jax
import pytest
from hypothesis import Verbosity, settings
from jaxtyping import install_import_hook


def check_types_of_everything_but_the_toolkit():
    """Before the package is imported. beartype samples containers by `random`, which hypothesis forbids strategies."""
    assert "gated_delta" not in sys.modules, "gated_delta was imported before its type checks were installed"
    spec = importlib.util.find_spec("gated_delta")
    assert spec is not None and spec.origin is not None, "gated_delta is not installed"
    rooms = [path.stem for path in Path(spec.origin).parent.iterdir() if path.suffix == ".py" or path.is_dir()]
    modules = [f"gated_delta.{room}" for room in rooms if room not in ("__init__", "testing")]
    install_import_hook(modules, "beartype.beartype")


check_types_of_everything_but_the_toolkit()

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_enable_compilation_cache", False)
# These two: a tenth less time. Nobody reads where in the source an instruction of a test's program comes from, and what
# JAX keeps of every trace is gone through at each of Python's full collections.
jax.config.update("jax_include_full_tracebacks_in_locations", False)
gc.set_threshold(100_000, 50, 1000)
jax.config.update("jax_num_cpu_devices", 8)  # for the laws about meshes; everything else runs on the first

plain = settings.get_profile("default")  # on a CI machine hypothesis starts from another: no example is random there
settings.register_profile("fast", plain, deadline=None, max_examples=10, derandomize=True)
settings.register_profile("thorough", plain, deadline=None, max_examples=500)
settings.register_profile("debug", plain, deadline=None, max_examples=10, verbosity=Verbosity.verbose)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


MOST_MAPS = 45_000  # of the 65,530 that Linux gives a process; at the limit XLA's compiler dies of a segmentation fault
tests_done = 0


def pytest_runtest_teardown():
    """Every compiled program holds memory maps, with jax 0.11 ten thousands of them after half of the suite. A test of
    layers may add 2,000; to count 45,000 takes 15 ms."""
    global tests_done
    tests_done += 1
    maps = Path("/proc/self/maps")
    if tests_done % 5 == 0 and maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()


@pytest.fixture
def getkey():
    """A function that returns another JAX random key at every call."""
    keys = iter(jax.random.split(jax.random.key(0), 1000))
    return lambda: next(keys)
