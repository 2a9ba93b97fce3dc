"""What every case is compared with: the recurrence and its gradients in float64, token by token, in plain NumPy.

Nothing here comes from the package. Arrays go by name in a dict: `q`, `k`, `v`, and where they are given `log_decay`,
`initial_state` and either `beta` (tied erase and write) or `erase` and `write`; every gate has its last axis. The
layout is that of `gated_delta`. Whatever dtype comes in is taken at its values.
"""

import itertools

import numpy as np

TOKENS = ("q", "k", "v", "log_decay", "beta", "erase", "write")
"""Names of the arrays with a time axis."""


def recurrence(arrays, *, scale=None):
    """Outputs `[batch, time, value_heads, value_dim]` and final states, `{"out", "final_state"}`."""
    return _forward(_wide(arrays), scale)[0]


def recurrence_with_gradients(arrays, d_out, d_final_state, *, scale=None):
    """`recurrence` and `d_x` for every array x, pulled back from the two cotangents."""
    wide = _wide(arrays)
    results, states, decayed, written = _forward(wide, scale)
    scale = wide["k"].shape[-1] ** -0.5 if scale is None else float(scale)
    d_out, d_state = np.float64(d_out), np.float64(d_final_state).copy()
    d_wide = {name: np.zeros_like(wide[name]) for name in _WIDE}
    for t in reversed(range(d_out.shape[1])):
        q, k, v, log_decay, erase, write = (wide[name][:, t] for name in _WIDE)
        d_state += scale * _outer(q, d_out[:, t])
        d_wide["q"][:, t] = scale * _read(states[t + 1], d_out[:, t])
        d_wide["k"][:, t] = _read(d_state, written[t])
        d_written = _recall(d_state, k)
        d_wide["v"][:, t], d_wide["write"][:, t] = d_written * write, d_written * v
        d_key = -_read(decayed[t], d_written)  # the cotangent of erase * k
        d_wide["k"][:, t] += d_key * erase
        d_wide["erase"][:, t] = d_key * k
        d_decayed = d_state - _outer(erase * k, d_written)
        d_wide["log_decay"][:, t] = np.sum(d_decayed * decayed[t], axis=-1)
        d_state = np.exp(log_decay)[..., None] * d_decayed
    gradients = {f"d_{name}": _narrow(d_wide[name], arrays[name]) for name in d_wide if name in arrays}
    if "beta" in arrays:
        gradients["d_beta"] = sum(_narrow(d_wide[name], arrays["beta"]) for name in ("erase", "write"))
    if "initial_state" in arrays:
        gradients["d_initial_state"] = d_state
    return results | gradients


def cut(arrays, start, stop, row=None, state=None):
    """Tokens `start:stop` of the batch row `row` (`None`: of all), with `initial_state[state]` as initial state."""
    rows = slice(None) if row is None else slice(row, row + 1)
    out = {name: x[rows, start:stop] for name, x in arrays.items() if name in TOKENS}
    if "initial_state" in arrays and state is not None:
        out["initial_state"] = arrays["initial_state"][state]
    return out


def packed(arrays, offsets, d_out, d_final_state, *, scale=None):
    """`recurrence_with_gradients` of the one row of `arrays` whose document i is `offsets[i]:offsets[i + 1]`: every
    document by itself, zeros past the last offset."""
    documents = len(offsets) - 1
    shape = (documents, *d_final_state.shape[1:])
    out = {"out": np.zeros(d_out.shape), "final_state": np.zeros(shape)}
    out |= {f"d_{name}": np.zeros(x.shape) for name, x in arrays.items()}
    for i, (start, stop) in enumerate(itertools.pairwise(offsets)):
        alone = cut(arrays, start, stop, state=slice(i, i + 1))
        alone = recurrence_with_gradients(alone, d_out[:, start:stop], d_final_state[i : i + 1], scale=scale)
        for name, x in alone.items():
            if name in ("final_state", "d_initial_state"):
                out[name][i : i + 1] = x
            else:
                out[name][:, start:stop] = x
    return out


# ---- one token over all rows and heads -------------------------------------------------------------------------------

_WIDE = ("q", "k", "v", "log_decay", "erase", "write")


def _forward(wide, scale):
    scale = wide["k"].shape[-1] ** -0.5 if scale is None else float(scale)
    batch, time, heads, value_dim = wide["v"].shape
    state = wide["initial_state"]
    outs, states, decayed, written = np.zeros((batch, time, heads, value_dim)), [state], [], []
    for t in range(time):
        q, k, v, log_decay, erase, write = (wide[name][:, t] for name in _WIDE)
        state = np.exp(log_decay)[..., None] * state
        decayed.append(state)
        written.append(write * v - _recall(state, erase * k))
        state = state + _outer(k, written[t])
        states.append(state)
        outs[:, t] = scale * _recall(state, q)
    return {"out": outs, "final_state": state}, states, decayed, written


def _outer(a, b):
    return a[..., :, None] * b[..., None, :]


def _recall(state, key):
    """`state^T key`."""
    return np.einsum("bhkv,bhk->bhv", state, key)


def _read(state, value):
    """`state value`."""
    return np.einsum("bhkv,bhv->bhk", state, value)


# ---- every head and channel with a gate of its own, and back ---------------------------------------------------------


def _wide(arrays):
    """All arrays in float64 with one head per value head, gates at full width, and those not given filled in."""
    arrays = {name: np.asarray(x).astype(np.float64) for name, x in arrays.items()}
    batch, time, _, key_dim = arrays["k"].shape
    heads, value_dim = arrays["v"].shape[2:]
    beta = arrays.get("beta")
    given = {
        "log_decay": (arrays.get("log_decay"), key_dim, 0.0),
        "erase": (arrays.get("erase", beta), key_dim, 0.0),
        "write": (arrays.get("write", beta), value_dim, 1.0),
    }
    out = {name: _spread(arrays[name], heads, arrays[name].shape[3]) for name in ("q", "k", "v")}
    for name, (gate, width, missing) in given.items():
        full = (batch, time, heads, width)
        out[name] = np.full(full, missing) if gate is None else _spread(gate, heads, width)
    out["initial_state"] = arrays.get("initial_state", np.zeros((batch, heads, key_dim, value_dim)))
    return out


def _spread(x, heads, width):
    """Each entry for an equal run of heads and of channels."""
    return np.repeat(np.repeat(x, heads // x.shape[2], axis=2), width // x.shape[3], axis=3)


def _narrow(d_wide, x):
    """The sum of `d_wide` over the runs that `_spread` gave to each entry of `x`."""
    batch, time, heads, width = x.shape
    runs = (batch, time, heads, d_wide.shape[2] // heads, width, d_wide.shape[3] // width)
    return d_wide.reshape(runs).sum(axis=(3, 5))
