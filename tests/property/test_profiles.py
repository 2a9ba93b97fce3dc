"""How the tests themselves are run."""

import importlib.metadata
import os

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, Verbosity, settings

import gated_delta

EXAMPLES = {"fast": 10, "thorough": 500, "debug": 10}


def test_the_profile_asked_for_is_loaded():
    name = os.environ.get("HYPOTHESIS_PROFILE", "fast")
    loaded, asked = settings(), settings.get_profile(name)
    assert loaded.max_examples == asked.max_examples == EXAMPLES[name]
    assert loaded.derandomize == asked.derandomize == (name == "fast")
    assert (loaded.verbosity == Verbosity.verbose) == (name == "debug")


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_profile_has_a_deadline_or_silences_a_health_check(name):
    """The first example of a shape compiles: a deadline would call that flaky."""
    profile = settings.get_profile(name)
    assert profile.deadline is None
    assert set(profile.suppress_health_check) <= set(HealthCheck) - {HealthCheck.filter_too_much}
    assert not profile.suppress_health_check


def test_dtypes_promote_strictly():
    with pytest.raises(Exception, match="no available implicit dtype promotion path"):
        jnp.ones(1, jnp.float32) + jnp.ones(1, jnp.bfloat16)


def test_our_own_code_is_type_checked():
    with pytest.raises(Exception, match="Type-check error"):
        gated_delta._heads.widen(jnp.ones((3, 2)).astype(jnp.int32), 4)


def test_the_compilation_cache_is_off_and_there_are_eight_cpu_devices():
    assert not jax.config.jax_enable_compilation_cache
    assert len(jax.devices("cpu")) == 8


def test_the_flag_of_jaxlib_0_10_is_set_there_only():
    flag = "--xla_cpu_use_fusion_emitters=false"
    assert (flag in os.environ.get("XLA_FLAGS", "")) == importlib.metadata.version("jaxlib").startswith("0.10")
