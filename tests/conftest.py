"""How every test runs: strict dtype promotion, type checks of our own code, hypothesis profiles, 4 CPU devices."""

import os
import sys
from importlib.metadata import version

if version("jaxlib").startswith("0.10"):
    # Compiles small float32 problems 2 times faster. From 0.11 on the flag is unknown and would abort.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false".strip()

import jax
import pytest
from hypothesis import Verbosity, settings
from jaxtyping import install_import_hook

assert "gated_delta" not in sys.modules, "gated_delta was imported before its type checks were installed"
install_import_hook("gated_delta", "beartype.beartype")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_enable_compilation_cache", False)
jax.config.update("jax_num_cpu_devices", 4)  # for the laws about meshes; everything else runs on the first

settings.register_profile("fast", deadline=None, max_examples=10, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=500)
settings.register_profile("debug", deadline=None, max_examples=10, verbosity=Verbosity.verbose)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


@pytest.fixture
def getkey():
    """A function that returns another JAX random key at every call."""
    keys = iter(jax.random.split(jax.random.key(0), 1000))
    return lambda: next(keys)
