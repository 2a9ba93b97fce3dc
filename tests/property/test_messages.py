"""Every error a user can cause says what is needed, what came and what to do, with run-time type checks and without."""

import dataclasses
import functools
import json
import pathlib
import re
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gated_delta import (
    GDN,
    AttentionConfig,
    Chunked,
    GatedDeltaMixer,
    Gates,
    HybridConfig,
    HybridStack,
    MixerConfig,
    Recurrent,
    SoftmaxAttention,
    Variant,
    cast_params,
    explain,
    gated_delta,
    gated_delta_raw_step,
    gated_delta_step,
    variants,
)
from gated_delta.attention import BlockedAttention

B, T, H, HV, K, V = 2, 5, 2, 4, 4, 3


class Refuses(Chunked):
    def why_not(self, problem):
        return f"key_dim is {problem.k.shape[-1]}, and it needs a multiple of 128"


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def call(function=gated_delta, **changes):
    arguments = {"q": zeros(B, T, H, K), "k": zeros(B, T, H, K), "v": zeros(B, T, HV, V), "gates": gates()}
    arguments |= changes
    return lambda: function(**arguments)


def gates(decay=(B, T, HV, K), erase=(B, T, HV), write=(B, T, HV, V), **options):
    arrays = (None if shape is None else zeros(*shape) for shape in (decay, erase, write))
    return Gates(*arrays, **options)


def beta(shape=(B, T, HV), decay=(B, T, HV, K), **options):
    return Gates.tied(zeros(*shape), zeros(*decay), **options)


def with_value(name, index, value, **options):
    made = gates(**options)
    array = np.array(getattr(made, name))
    array[index] = value
    return dataclasses.replace(made, **{name: jnp.asarray(array)})


def packed(**changes):
    one = {"q": zeros(1, T, H, K), "k": zeros(1, T, H, K), "v": zeros(1, T, HV, V), "gates": Gates()}
    return call(**one, **changes)


def offsets(*values, dtype=np.int32):
    return np.array(values, dtype)


def ids(*rows):
    return np.array(rows, np.int32)


def in_float64():
    with jax.enable_x64(True):
        v = np.zeros((B, T, HV, V))
        return gated_delta(zeros(B, T, H, K), zeros(B, T, H, K), v, Gates(), inverse="approx")


STEP = {"q": zeros(B, H, K), "k": zeros(B, H, K), "v": zeros(B, HV, V), "gates": Gates()}

MODEL = 8
DELTA = MixerConfig(Variant(), model=MODEL, key_heads=1, value_heads=2, key_dim=4, value_dim=4)
ATTENTION = AttentionConfig(MODEL, query_heads=2, window=4)
LAYERS = {
    "mixer": lambda key: GDN(MODEL, key_heads=1, key=key),
    "attention": lambda key: SoftmaxAttention(ATTENTION, key=key),
    "stack": lambda key: HybridStack(
        HybridConfig("dA", hidden=4, repeats=3, delta=DELTA, attention=ATTENTION), key=key
    ),
}


@functools.cache
def shape_of(name):
    return eqx.filter_eval_shape(LAYERS[name], jax.random.key(0))


def layer(name, run):
    """`run` of a layer whose parameters are shapes only: no error is about their values."""
    return lambda: eqx.filter_eval_shape(run, shape_of(name))


X, TOKENS = zeros(B, T, MODEL), zeros(B, MODEL)

ERRORS = {
    # arrays
    "list": (call(q=[1.0]), TypeError, r"`q` must be a JAX or NumPy array of floating-point numbers, but a list came"),
    "integers": (
        call(k=zeros(B, T, H, K, dtype=np.int32)),
        TypeError,
        r"`k` must hold floating-point numbers, but its dtype is int32. Convert it, for example with `k.astype",
    ),
    "complex": (call(v=zeros(B, T, HV, V, dtype=np.complex64)), TypeError, r"`v` must hold .* dtype is complex64"),
    "rank": (
        call(q=zeros(T, H, K)),
        ValueError,
        r"`q` must be \[batch, time, heads, dim\], but its shape is \(5, 2, 4\)",
    ),
    "no heads": (
        call(q=zeros(B, T, 0, K), k=zeros(B, T, 0, K)),
        ValueError,
        r"`q` needs at least one head and one chan",
    ),
    "no channels": (call(v=zeros(B, T, HV, 0)), ValueError, r"`v` needs at least one head .* \(2, 5, 4, 0\)"),
    "key shape": (
        call(k=zeros(B, T, 3, K)),
        ValueError,
        r"`k` must have the shape of `q`, .* = \(2, 5, 2, 4\), but its shape is \(2, 5, 3, 4\)",
    ),
    "value time": (call(v=zeros(B, 6, HV, V)), ValueError, r"`v` must share batch and time with `k`, \(2, 5\), but"),
    "head first": (
        call(v=zeros(B, HV, T, V)),
        ValueError,
        r"\(2, 4, 5, 3\). The layout is \[batch, time, heads, dim\]",
    ),
    "3 over 2 heads": (
        call(v=zeros(B, T, 3, V)),
        ValueError,
        r"needs value_heads to be a multiple of key_heads, but v has 3 and k has 2. .* project k to 3 heads",
    ),
    "2 over 4 heads": (
        call(q=zeros(B, T, 4, K), k=zeros(B, T, 4, K), v=zeros(B, T, 2, V)),
        ValueError,
        r"multiple of key_heads, but v has 2 and k has 4",
    ),
    # gates
    "no Gates": (
        call(gates=zeros(B, T, H)),
        TypeError,
        r"`gates` must be a `gated_delta.Gates`, but a NumPy array came. Buil",
    ),
    "gate list": (lambda: Gates(erase=[0.5]), TypeError, r"`erase` must be a JAX or NumPy array .* but a list came"),
    "gate integers": (
        lambda: Gates(zeros(1, 1, dtype=int)),
        TypeError,
        r"`log_decay` must hold floating-point numbers",
    ),
    "gate shape only": (
        lambda: Gates(write=jax.ShapeDtypeStruct((1, 1), jnp.int32)),
        TypeError,
        r"`write` must hold floating-point numbers, but its dtype is int32",
    ),
    "tie without beta": (
        lambda: Gates(is_tied=True),
        ValueError,
        r"needs `erase` \(the beta .*`Gates.tied\(beta, log_deca",
    ),
    "tie with write": (lambda: Gates(None, zeros(1), zeros(1), is_tied=True), ValueError, r"and no `write`"),
    "erase_max 3": (lambda: Gates(erase_max=3), ValueError, r"`Gates\(erase_max=3\)` must lie in \(0, 2\]: beyond 2"),
    "erase_max 0": (lambda: Gates(erase_max=0.0), ValueError, r"`Gates\(erase_max=0.0\)` must lie in \(0, 2\]"),
    "log_decay_min 0": (lambda: Gates(log_decay_min=0), ValueError, r"`Gates\(log_decay_min=0\)` must be negative"),
    "promise list": (
        lambda: Gates(erase_max=[1.0]),
        TypeError,
        r"`erase_max` and `log_decay_min` to be Python numbers",
    ),
    "gate heads": (
        call(gates=gates(decay=(B, T, 3, K))),
        ValueError,
        r"`gates.log_decay` must be .* 2 \(key\) or 4 \(value\) heads, but its shape is \(2, 5, 3, 4\)",
    ),
    "gate time": (
        call(gates=gates(erase=(B, 4, HV))),
        ValueError,
        r"`gates.erase` must be .* time 5 .* is \(2, 4, 4\)",
    ),
    "gate rank": (call(gates=gates(write=(B, T))), ValueError, r"`gates.write` must be .* but its shape is \(2, 5\)"),
    "decay tiles": (
        call(gates=gates(decay=(B, T, HV, 3))),
        ValueError,
        r"The last axis of `gates.log_decay` must be 1, a number of decay tiles that divides key_dim = 4, or key_dim",
    ),
    "erase channels": (
        call(gates=gates(erase=(B, T, HV, 2))),
        ValueError,
        r"`gates.erase` must be 1 or key_dim = 4, but",
    ),
    "write channels": (
        call(gates=gates(write=(B, T, HV, 2))),
        ValueError,
        r"`gates.write` must be 1 or value_dim = 3, b",
    ),
    "beta per channel": (
        call(gates=beta(shape=(B, T, HV, K))),
        ValueError,
        r"A tied beta must be one number per head and token, but its shape is \(2, 5, 4, 4\). Give `erase` and `write`",
    ),
    "two owners": (
        call(gates=gates(decay=(B, T, H, K))),
        ValueError,
        r"must have one owner, but their head counts are 2 and 4. Repeat the one of the key heads to all 4 value heads",
    ),
    # values
    "log_decay above 0": (
        call(gates=with_value("log_decay", (1, 2, 3, 0), 0.5)),
        ValueError,
        r"`gates.log_decay` must be at most 0 .*, but its largest value is 0.5, at index \(1, 2, 3, 0\)",
    ),
    "log_decay below its promise": (
        call(gates=with_value("log_decay", (0, 4, 1, 2), -7, log_decay_min=-5)),
        ValueError,
        r"`gates.log_decay` must be in \[-5, 0\] \(`log_decay_min` promises the lower end\), but its smallest value is "
        r"-7, at index \(0, 4, 1, 2\).$",
    ),
    "log_decay above 0, its promise kept": (
        call(gates=with_value("log_decay", (0, 4, 1, 2), 7, log_decay_min=-5)),
        ValueError,
        r"must be at most 0 \(the natural logarithm of what is kept, so that 0 keeps everything\), but its largest "
        r"value is 7, at index \(0, 4, 1, 2\).$",
    ),
    "decay for its logarithm": (
        call(gates=dataclasses.replace(gates(), log_decay=jnp.full((B, T, HV, K), 0.9))),
        ValueError,
        r"largest value is 0.9, at index .* Did you pass what is kept, exp\(log_decay\), .*\? Then use `jnp.log` of it",
    ),
    "erase above 1": (
        call(gates=with_value("erase", (0, 1, 2), 1.5)),
        ValueError,
        r"`gates.erase` must be in \[0, 1\] \(`erase_max` promises the upper end\), but its largest value is 1.5, at",
    ),
    "beta above 2": (
        call(gates=dataclasses.replace(beta(erase_max=2), erase=2.5 + jnp.zeros((B, T, HV)))),
        ValueError,
        r"`gates.erase \(beta\)` must be in \[0, 2\] .* largest value is 2.5",
    ),
    "erase below 0": (
        call(gates=with_value("erase", (0, 1, 2), -1)),
        ValueError,
        r"`gates.erase` must .* value is -1, at",
    ),
    # options
    "gates as a JAX array": (
        lambda: call(gates=jnp.zeros(3))(),
        TypeError,
        r"`gates` must be a `gated_delta.Gates`, but a JAX array came. Build it with",
    ),
    "inverse number": (call(inverse=3), TypeError, r"`inverse` must be a string, but an int came"),
    "inverse word": (
        call(inverse="newton"),
        ValueError,
        r"`inverse='newton'` is not known: use 'exact', 'approx', 'subs",
    ),
    "inverse terms": (call(inverse="truncated:0"), ValueError, r"`inverse='truncated:0'` is not known"),
    "approx doubled": (
        call(gates=gates(erase_max=2), inverse="approx"),
        ValueError,
        r"`inverse='approx'` needs gates with `erase_max` of at most 1, but it is 2.0: .* Use `inverse='exact'`",
    ),
    "approx float64": (in_float64, ValueError, r"`inverse='approx'` rounds to bfloat16: not for float64 inputs. Use"),
    "truncated unbounded": (
        call(inverse="truncated:3"),
        ValueError,
        r"`inverse='truncated:3'` is right only where decay is strong, .*`log_decay_min`. Use `inverse='exact'`",
    ),
    "precision": (
        call(precision="low"),
        ValueError,
        r"`precision='low'` must be one of \('default', 'high', 'highest'\)",
    ),
    "scale text": (call(scale="1"), TypeError, r"`scale` must be a number or a scalar array, but a str came"),
    "scale vector": (call(scale=zeros(2)), ValueError, r"`scale` must be one float number, but it is float32\[2\]"),
    "scale integer": (call(scale=np.int32(2)), ValueError, r"`scale` must be one float number, but it is int32\[\]"),
    "backend word": (
        call(backend="chunked"),
        TypeError,
        r"`backend` must be a backend such as `gated_delta.Chunked\(\)`, or None, but a str came",
    ),
    "backend that cannot": (
        call(backend=Refuses()),
        ValueError,
        r"Refuses\(\) cannot run: key_dim is 4, and it needs a multiple of 128. A named backend is never replaced",
    ),
    "chunk_size": (lambda: Chunked(48), ValueError, r"`Chunked\(chunk_size=48\)` must be one of \(16, 32, 64, 128\)"),
    "chunk_size text": (
        lambda: Chunked("64"),
        ValueError,
        r"`Chunked\(chunk_size=64\)` must be one of \(16, 32, 64, 128\)",
    ),
    "residuals": (
        lambda: Chunked(residuals="some"),
        ValueError,
        r"`Chunked\(residuals='some'\)` must be 'solves', 'states', ",
    ),
    "checkpoint_every": (
        lambda: Recurrent(0),
        ValueError,
        r"`Recurrent\(checkpoint_every=0\)` must be at least 1",
    ),
    # states
    "state list": (call(initial_state=[0.0]), TypeError, r"`initial_state` must be a JAX or NumPy array"),
    "state of values first": (
        call(initial_state=zeros(B, HV, V, K)),
        ValueError,
        r"`initial_state` must be \[batch, value_heads, key_dim, value_dim\] = \(2, 4, 4, 3\), key axis first, but",
    ),
    "states of documents": (
        packed(cu_seqlens=offsets(0, 2, 5), initial_state=zeros(3, HV, K, V)),
        ValueError,
        r"`initial_state` must be \[documents, value_heads, key_dim, value_dim\] = \(2, 4, 4, 3\)",
    ),
    "states of segments": (
        call(segment_ids=ids([0] * T, [0] * T), num_segments=3, initial_state=zeros(B, HV, K, V)),
        ValueError,
        r"`initial_state` must be \[batch, num_segments, value_heads, key_dim, value_dim\] = \(2, 3, 4, 4, 3\)",
    ),
    # documents
    "both packings": (
        packed(cu_seqlens=offsets(0, 5), segment_ids=ids([0] * T)),
        ValueError,
        r"Give `segment_ids` or `cu_seqlens`, not both",
    ),
    "num_segments alone": (call(num_segments=2), ValueError, r"`num_segments` goes with `segment_ids`"),
    "num_segments array": (
        call(segment_ids=ids([0] * T, [0] * T), num_segments=np.int32(2)),
        TypeError,
        r"`num_segments` must be a Python int, since it is a shape, but an int32 came",
    ),
    "num_segments bool": (
        call(segment_ids=ids([0] * T, [0] * T), num_segments=True),
        TypeError,
        r"`num_segments` must be a Python int, since it is a shape, but a bool came",
    ),
    "num_segments 0": (
        call(segment_ids=ids([0] * T, [0] * T), num_segments=0),
        ValueError,
        r"`num_segments` must be at least 1, but it is 0",
    ),
    "ids list": (
        call(segment_ids=[[0] * T] * 2),
        TypeError,
        r"`segment_ids` must be a JAX or NumPy array of integers, bu",
    ),
    "ids float": (
        call(segment_ids=zeros(B, T)),
        TypeError,
        r"`segment_ids` must hold integers, but its dtype is float32",
    ),
    "ids shape": (
        call(segment_ids=ids([0] * T)),
        ValueError,
        r"`segment_ids` must be \[batch, time\] = \(2, 5\), but its shape is \(1, 5\)",
    ),
    "ids fall": (
        call(segment_ids=ids([0] * T, [0, 3, -1, 2, 3])),
        ValueError,
        r"`segment_ids` must rise along time .* but row 1 falls to 2 at token 3.$",
    ),
    "ids padded by 0": (
        layer("mixer", lambda m: m(X, segment_ids=ids([0] * T, [1, 1, 2, 0, 0]))),
        ValueError,
        r"falls to 0 at token 3. Where 0 is padding, pass `jnp.where\(segment_ids == 0, -1, segment_ids\)`",
    ),
    "ids too large": (
        call(segment_ids=ids([0] * T, [0, 0, 0, 0, 7]), num_segments=2),
        ValueError,
        r"`segment_ids` must be below `num_segments=2`, but the largest is 7",
    ),
    "offsets list": (packed(cu_seqlens=[0, 5]), TypeError, r"`cu_seqlens` must be a JAX or NumPy array of integers"),
    "offsets float": (
        packed(cu_seqlens=offsets(0, 5, dtype=np.float32)),
        TypeError,
        r"`cu_seqlens` must hold integers, but its dtype is float32",
    ),
    "offsets of a batch": (
        call(cu_seqlens=offsets(0, 5)),
        ValueError,
        r"`cu_seqlens` .* needs batch 1, but batch is 2. Reshape to one row, or use `segment_ids`",
    ),
    "offsets matrix": (
        packed(cu_seqlens=ids([0, 5])),
        ValueError,
        r"`cu_seqlens` must be \[documents \+ 1\], but its sha",
    ),
    "no offsets": (
        packed(cu_seqlens=offsets()),
        ValueError,
        r"`cu_seqlens` must be \[documents \+ 1\], but its shape is",
    ),
    "offsets fall": (
        packed(cu_seqlens=offsets(0, 4, 2)),
        ValueError,
        r"never fall, and .* time = 5, but it is \[0 4 2\]",
    ),
    "offsets past time": (packed(cu_seqlens=offsets(0, 6)), ValueError, r"end at most at time = 5, but it is \[0 6\]"),
    "offsets not from 0": (packed(cu_seqlens=offsets(1, 5)), ValueError, r"must begin with 0, .* but it is \[1 5\]"),
    # step and explain
    "step with time": (
        lambda: gated_delta_step(**{**STEP, "q": zeros(B, 1, H, K)}),
        ValueError,
        r"`gated_delta_step` needs `q` to be \[batch, heads, dim\], without time, but its shape is \(2, 1, 2, 4\)",
    ),
    "step without Gates": (
        lambda: gated_delta_step(**{**STEP, "gates": None}),
        TypeError,
        r"`gates` must be a `gated_delt",
    ),
    "step state": (
        lambda: gated_delta_step(**STEP, state=zeros(B, HV, V, K)),
        ValueError,
        r"`state` must be \[batch, value_heads, key_dim, value_dim\] = \(2, 4, 4, 3\), key axis first, but its",
    ),
    "step pool": (
        lambda: gated_delta_step(**STEP, state=zeros(7, HV, V, K), slots=np.zeros(2, int)),
        ValueError,
        r"`state` must be \[slots, value_heads, key_dim, value_dim\] = \(slots, 4, 4, 3\), key axis first, but its",
    ),
    "step slots without a pool": (
        lambda: gated_delta_step(**STEP, slots=np.zeros(2, int)),
        ValueError,
        r"`gated_delta_step` needs `state` where it has `slots`: they say which of its states are meant",
    ),
    "step slots of an empty pool": (
        lambda: gated_delta_step(**STEP, state=zeros(0, HV, K, V), slots=np.zeros(2, int)),
        ValueError,
        r"`gated_delta_step` needs a `state` of at least one slot, but its shape is \(0, 4, 4, 3\)",
    ),
    "step slots of floats": (
        lambda: gated_delta_step(**STEP, state=zeros(7, HV, K, V), slots=zeros(2)),
        TypeError,
        r"`slots` must be a JAX or NumPy array of integers, one for each row, but dtype float32 came",
    ),
    "step slots of others": (
        lambda: gated_delta_step(**STEP, state=zeros(7, HV, K, V), slots=np.zeros(3, int)),
        ValueError,
        r"one entry for each of the 2 rows of this call, -1 for padding, but its shape is \(3,\)",
    ),
    "step fresh": (
        lambda: gated_delta_step(**STEP, fresh=np.zeros(2)),
        ValueError,
        r"`fresh` must be a boolean array with one entry for each of 2 slots, but float64 \(2,\) came",
    ),
    "raw step without RawGates": (
        lambda: gated_delta_raw_step(**STEP),
        TypeError,
        r"`gates` must be a `gated_delta.RawGates`, but a Gates came",
    ),
    "explain nothing": (
        call(explain, q=zeros(B, 0, H, K), k=zeros(B, 0, H, K), v=zeros(B, 0, HV, V), gates=Gates()),
        ValueError,
        r"`explain` needs at least one token and one batch row: an empty call runs no backend",
    ),
    "explain heads": (
        call(explain, v=zeros(B, T, 3, V)),
        ValueError,
        r"multiple of key_heads, but v has 3 and k has 2",
    ),
    # states of layers
    "batch of an array": (
        layer("mixer", lambda m: m.init_state(X)),
        TypeError,
        r"`init_state` needs `batch` to be a Python int of at least 0, or None .* NumPy array of shape \(2, 5, 8\)"
        r".* give `x.shape\[0\]`",
    ),
    "batch of a tracer": (
        lambda: jax.eval_shape(shape_of("mixer").init_state, np.int32(3)),
        TypeError,
        r"`init_state` needs `batch` .*, but a JAX array of shape \(\) came",
    ),
    "batch of a tuple": (
        layer("stack", lambda m: m.init_state((3,))),
        TypeError,
        r"`init_state` needs .* a tuple came",
    ),
    "batch of a float": (layer("attention", lambda m: m.init_state(2.0)), TypeError, r"`init_state` .* a float came"),
    "batch of a bool": (layer("mixer", lambda m: m.init_state(True)), TypeError, r"`init_state` .* a bool came"),
    "batch below 0": (layer("stack", lambda m: m.init_state(-1)), ValueError, r"`init_state` needs .*, but it is -1"),
    "mask by position": (
        layer("mixer", lambda m: m(X, np.ones((B, T), bool))),
        TypeError,
        r"`state` must be a `MixerState`, but a NumPy array came. `mask` is a keyword: `mixer\(x, mask=...\)`",
    ),
    "ids by position": (
        layer("attention", lambda m: m(X, jnp.zeros((B, T), int))),
        TypeError,
        r"`state` must be a `KVCache`, but a JAX array came. `segment_ids` is a keyword: `mixer\(x, segment_ids=",
    ),
    "key by position": (
        layer("stack", lambda m: m(X, jax.random.key(0))),
        TypeError,
        r"`state` must be a tuple of the states of 2 mixers \(`MixerState`, `KVCache`\), as `stack.init_state` makes "
        r"it, but a JAX array came. `key` is a keyword: `stack\(x, key=...\)`",
    ),
    "both results of a mixer": (
        layer("mixer", lambda m: m(X, m(X))),
        TypeError,
        r"`MixerState`, but a tuple came. A call returns `\(out, state\)`: pass the second of the two, as in `out",
    ),
    "both results of attention": (
        layer("attention", lambda m: m.step(TOKENS, m(X))),
        TypeError,
        r"`KVCache`, but a tuple came. A call returns `\(out, state\)`: pass the second of the two",
    ),
    "both results of a stack": (
        layer("stack", lambda m: m(X, m(X))),
        TypeError,
        r"`state` must be a tuple of the states .* but a tuple came. A call returns `\(out, state\)`: pass the second",
    ),
    "state of a word": (
        layer("mixer", lambda m: m.step(TOKENS, "fresh")),
        TypeError,
        r"but a str came. `mixer.init_state\(\)` makes the first one, and every call returns the next",
    ),
    "step of a sequence": (
        layer("mixer", lambda m: m.step(X[0], m.init_state())),
        ValueError,
        r"`state.q_window` must have the shape \(5, 3, 8\) for this call, but it is \(3, 8\). `step` takes one token, "
        r"`x` \[model\] or \[batch, model\], so that \(5, 8\) is one token of 5 sequences; a sequence goes to `mixer",
    ),
    "step of a sequence by attention": (
        layer("attention", lambda m: m.step(X[0], m.init_state())),
        ValueError,
        r"leading axes \(5,\) for this call, .*. `step` takes one token, .*; a sequence goes to `mixer\(x, state\)",
    ),
    "step of a sequence by a stack": (
        layer("stack", lambda m: m.step(X[0], m.init_state())),
        ValueError,
        r"`state\[0\]` must have the leading axes \(5, 3\) for this call, .* but they are \(3,\). `step` takes one "
        r"token, .*; a sequence goes to `stack\(x, state\)`. `stack.init_state\(batch\)` makes",
    ),
    "step of a batch of sequences": (
        layer("mixer", lambda m: m.step(X, m.init_state(B))),
        ValueError,
        r"`x` must be one token, \[model\] or \[batch, model\], with model = 8, but its shape is \(2, 5, 8\)",
    ),
    "step of a batch of sequences by a stack": (
        layer("stack", lambda m: m.step(X, m.init_state(B))),
        ValueError,
        r"`x` must be one token, \[model\] or \[batch, model\], with model = 8, but its shape is \(2, 5, 8\)",
    ),
    "state of one sequence for a batch": (
        layer("stack", lambda m: m(X, m.init_state())),
        ValueError,
        r"`state\[0\]` must have the leading axes \(2, 3\) for this call, those of `x` and the repeats of the pattern, "
        r"but they are \(3,\). `stack.init_state\(batch\)` makes",
    ),
    # what layers are made of
    "backend class": (
        call(backend=Chunked),
        TypeError,
        r"such as `gated_delta.Chunked\(\)`, or None, but the class `Chunked` came: call it, `Chunked\(\)`",
    ),
    "backend class explained": (
        call(explain, backend=Recurrent),
        TypeError,
        r"class `Recurrent` came: call it, `Recur",
    ),
    "backend class of a layer": (
        lambda: GDN(MODEL, backend=Recurrent, key=jax.random.key(0)),
        TypeError,
        r"but the class `Recurrent` came: call it, `Recurrent\(\)`",
    ),
    "backend class of attention": (
        lambda: SoftmaxAttention(ATTENTION, backend=BlockedAttention, key=jax.random.key(0)),
        TypeError,
        r"`backend` must be an attention backend .*, but the class `BlockedAttention` came: call it, `BlockedAtten",
    ),
    "backend class of another kind": (
        lambda: SoftmaxAttention(ATTENTION, backend=Chunked, key=jax.random.key(0)),
        TypeError,
        r"`backend` must be an attention backend .*, but the class `Chunked` came.$",
    ),
    "constructor for a variant": (
        lambda: MixerConfig(GDN, model=8, key_heads=1, value_heads=1, key_dim=8, value_dim=8),
        TypeError,
        r"must be a `Variant`, but a function came. Those of the published members are `gdn`, `kda`, `gdn2`, `sla`, "
        r"`delta_net` and `gla` of `gated_delta.variants`",
    ),
    "variant for a config": (
        lambda: GatedDeltaMixer(Variant(), key=jax.random.key(0)),
        TypeError,
        r"needs a `MixerConfig`, but a Variant came. Wrap it: `MixerConfig\(variant, model=...",
    ),
    "variant for a stack's config": (
        lambda: HybridConfig("d", hidden=4, delta=Variant()),
        TypeError,
        r"`delta` must be a `MixerConfig`, but a Variant came. Wrap it: `MixerConfig\(variant, model=...",
    ),
    "word for a config": (
        lambda: GatedDeltaMixer("gdn", key=jax.random.key(0)),
        TypeError,
        r"needs a `MixerConfig`, but a str came. `GDN\(model, key=key\)` and its like build the published members",
    ),
    "pattern for a config": (
        lambda: HybridStack("ddA", key=jax.random.key(0)),
        TypeError,
        r"`HybridStack` needs a `HybridConfig`, but a str came. Give `HybridConfig\('ddA', hidden=..., delta=Mixer",
    ),
    "size for a config": (
        lambda: SoftmaxAttention(8, key=jax.random.key(0)),
        TypeError,
        r"needs an `AttentionConfig`, but an int came. Give `AttentionConfig\(model, query_heads=...\)`",
    ),
    "key of an integer": (
        lambda: GDN(MODEL, key=0),
        TypeError,
        r"`key` must be one random key, such as `jax.random.key\(0\)`, but an int came",
    ),
    "key of floats": (
        lambda: HybridStack(HybridConfig("A", hidden=4, attention=ATTENTION), key=zeros(2)),
        TypeError,
        r"`key` must be one random key, .*, but an array of float32 came",
    ),
    "several keys": (
        lambda: SoftmaxAttention(ATTENTION, key=jax.random.split(jax.random.key(0), 3)),
        ValueError,
        r"`key` must be one random key, .*, but keys of shape \(3,\) came. For one layer of each use `eqx.filter_vmap`",
    ),
    "dtype word": (
        lambda: cast_params({}, "bf16"),
        TypeError,
        r"`cast_params` needs a floating-point dtype, such as `jnp.bfloat16` or 'bfloat16', but 'bf16' came",
    ),
    "no JSON": (
        lambda: MixerConfig.from_json("model"),
        ValueError,
        r"`MixerConfig.from_json` needs a JSON object with an object `variant`, as `to_json` writes it, but what came "
        r"is no JSON \(Expecting value.*It begins with 'model'; for a file give its text",
    ),
    "no JSON of a stack": (lambda: HybridConfig.from_json(""), ValueError, r"needs a JSON object, .* came is no JSON"),
    "JSON of a path": (
        lambda: AttentionConfig.from_json(pathlib.PurePosixPath("config.json")),
        TypeError,
        r"`AttentionConfig.from_json` needs a JSON object, .*, but a PurePosixPath came. For a file give `Attention",
    ),
    "JSON of a list": (lambda: MixerConfig.from_json("[]"), ValueError, r"as `to_json` writes it, but a list came"),
}


@pytest.mark.parametrize("cause, error, message", ERRORS.values(), ids=ERRORS)
def test_an_error_says_what_is_needed_and_what_came(cause, error, message):
    with pytest.raises(error, match=message) as caught:
        cause()
    assert type(caught.value) is error


def said():
    """Class and text of every error, by its name here."""
    texts = {}
    for name, (cause, _, _) in ERRORS.items():
        try:
            cause()
            texts[name] = "no error"
        except Exception as error:
            texts[name] = f"{type(error).__name__}: {error}"
    return texts


def test_errors_read_the_same_without_run_time_type_checks():
    program = f"import json, runpy; print(json.dumps(runpy.run_path({__file__!r})['said']()))"
    plain = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert json.loads(plain.stdout.splitlines()[-1]) == said()


def test_the_records_that_a_message_names_exist():
    with pytest.raises(TypeError) as caught:
        ERRORS["constructor for a variant"][0]()
    names = re.findall(r"`(\w+)`", str(caught.value).partition("Those")[2])
    assert names and all(isinstance(getattr(variants, name), Variant) for name in names)


def test_keys_of_the_old_kind_are_keys():
    for key in (jax.random.PRNGKey(0), np.asarray(jax.random.PRNGKey(0))):
        for make in LAYERS.values():
            assert jax.tree.leaves(jax.eval_shape(lambda make=make, key=key: eqx.filter(make(key), eqx.is_array)))


def test_a_state_of_as_many_rows_as_an_exported_program_will_have():
    (rows,) = jax.export.symbolic_shape("rows")
    for name in LAYERS:
        states = eqx.filter_eval_shape(lambda m: m.init_state(rows), shape_of(name))
        assert all(a.shape[0] == rows for a in jax.tree.leaves(states)), name


def test_values_that_only_a_run_can_see_are_refused_in_a_sentence():
    """By `checked`. JAX shows more lines around it."""

    @eqx.filter_jit
    def run(gates):
        return call(gates=gates, checked=True, backend=Recurrent())()

    for made, words in (
        (
            with_value("log_decay", (0, 4, 1, 2), 7),
            r"must be at most 0 \(the natural logarithm of what is kept, so .*\)",
        ),
        (
            with_value("log_decay", (0, 4, 1, 2), 7, log_decay_min=-5),
            r"must be in \[-5, 0\] \(`log_decay_min` .* end\)",
        ),
        (with_value("erase", (0, 1, 2), 1.5), r"must be in \[0, 1\] \(`erase_max` promises the upper end\)"),
    ):
        with pytest.raises(RuntimeError, match=words + r", but not all values of this call are\."):
            run(made)


@pytest.mark.smoke
def test_shapes_are_refused_under_jit_too():
    for name in ("key shape", "3 over 2 heads", "gate heads"):
        cause, error, message = ERRORS[name]
        with pytest.raises(error, match=message):
            jax.eval_shape(cause)
    with pytest.raises(ValueError, match=r"`k` must have the shape of `q`"):
        eqx.filter_jit(gated_delta)(zeros(B, T, H, K), zeros(B, T, 3, K), zeros(B, T, HV, V), gates())
