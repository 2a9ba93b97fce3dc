"""Training steps at scale: the prediction's counts against published models, laws of its arithmetic, and the count of
what a compiled program sends."""

import dataclasses
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "benchmarks"))

import aot_train_step as partition
import scaling_model as scaling


@pytest.fixture(autouse=True, scope="module")
def _promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


OPERATORS = scaling.read_figures()
CHOSEN = scaling.mixers(OPERATORS)
KDA = CHOSEN["theirs"]
MODELS = list(scaling.LADDER.values())
plans = st.builds(
    scaling.Plan,
    tokens=st.sampled_from([8192, 32768, 131072]),
    efficiency=st.floats(0.2, 0.9),
    slowdown=st.floats(1.0, 2.0),
    remat=st.booleans(),
    expert_chips=st.sampled_from([1, 8, 64]),
    hidden_share=st.floats(0.0, 1.0),
)


def test_counts_are_those_of_kimi_linear():
    """48B-A3B, https://huggingface.co/moonshotai/Kimi-Linear-48B-A3B-Base: 49.1 billion parameters in its files, about
    3 billion of them met by a token. Its softmax attention is of another kind than ours: that is 0.06 billion."""
    kimi = scaling.Model(width=2304, layers=27, experts=256, hidden=1024, vocabulary=163840, heads=32)
    count = scaling.parameters(kimi, KDA)
    assert count["total"] == pytest.approx(49.1e9, rel=0.01)
    assert count["active"] == pytest.approx(3.1e9, rel=0.1)


@pytest.mark.parametrize("label", scaling.LADDER)
def test_the_ladder_has_the_sizes_that_it_says(label):
    count = scaling.parameters(scaling.LADDER[label], KDA)
    assert count["total"] == pytest.approx(float(label.removesuffix("B")) * 1e9, rel=0.01)


@given(plan=plans, model=st.sampled_from(MODELS))
def test_a_step_is_the_sum_of_its_parts_and_none_is_free(plan, model):
    parts = scaling.step(model, KDA, plan)
    total = parts.pop("total")
    assert total == pytest.approx(sum(parts.values()))
    assert all(seconds > 0 for name, seconds in parts.items() if name != "waiting") and parts["waiting"] >= 0


@given(plan=plans, model=st.sampled_from(MODELS), ratio=st.floats(1.1, 10.0))
def test_a_faster_operator_gains_what_its_share_allows(plan, model, ratio):
    """The gain is the one that `needed_share` has for the operator's share, where no communication shows."""
    plan = dataclasses.replace(plan, hidden_share=1.0, tokens=1 << 20, expert_chips=1)
    slow = KDA.operator
    fast = scaling.Operator("fast", slow.forward / ratio, slow.both / ratio)
    parts = scaling.step(model, KDA, plan)
    gain = scaling.gain(model, dataclasses.replace(KDA, operator=fast), KDA, plan)
    assert parts["waiting"] == 0
    assert scaling.needed_share(gain, ratio) == pytest.approx(parts["operator"] / parts["total"])


@given(plan=plans, model=st.sampled_from(MODELS))
def test_the_same_mixer_gains_nothing_and_more_chips_for_experts_send_more_tokens(plan, model):
    assert scaling.gain(model, KDA, KDA, plan) == 0
    near, far = (dataclasses.replace(plan, expert_chips=chips) for chips in (8, 64))
    tokens = [
        scaling.communication(model, KDA, one) - scaling.communication(model, KDA, dataclasses.replace(one, tokens=0))
        for one in (near, far)
    ]
    assert tokens[1] > tokens[0] > 0


def test_the_published_range_needs_what_the_page_says():
    """By the default plan all models lie within it, at as many value heads."""
    gains = [scaling.gain(model, CHOSEN["heads"], KDA, scaling.Plan()) for model in MODELS]
    assert all(scaling.PUBLISHED[0] <= gain <= scaling.PUBLISHED[1] for gain in gains)


@pytest.mark.parametrize("outer, inner", [(1, 1), (3, 1), (3, 5)])
def test_what_is_sent_in_loops_is_counted_as_often_as_they_run(outer, inner):
    mesh = jax.make_mesh((2,), ("all",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def sums(x, count):
        return jax.lax.scan(lambda x, _: (jax.lax.psum(x, "all") / 2, None), x, None, count)[0]

    def local(x):
        x, _ = jax.lax.scan(lambda x, _: (sums(x, inner), None), x, None, outer)
        return jax.lax.ppermute(x, "all", [(0, 1)])

    run = jax.shard_map(local, mesh=mesh, in_specs=P("all"), out_specs=P("all"), check_vma=False)
    compiled = jax.jit(run).lower(jnp.zeros((2, 3, 7))).compile()
    counted = partition.count_collectives(compiled.as_text())
    assert counted["all-reduce"] == {"calls": outer * inner, "bytes": outer * inner * 3 * 7 * 4}
    assert counted["collective-permute"] == {"calls": 1, "bytes": 3 * 7 * 4}
