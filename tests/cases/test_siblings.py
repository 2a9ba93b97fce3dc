"""Siblings of the cases: the same classes of fault in other positions, gates, arguments, dtypes and transforms."""

import numpy as np
import pytest

from .harness import (
    BACKENDS,
    random_cotangents,
    random_inputs,
    run_with_gradients,
)

by_backend = pytest.mark.parametrize("backend", BACKENDS, ids=str)


# ---- containment (C01, C03, C13, C18, C21) ---------------------------------------------------------------------------

IDS = np.array([[0] * 7 + [1] * 8 + [2] * 9, [0] * 24], np.int32)
ROW, TOKEN, HEAD = 0, 9, 0  # in the middle of the second document of the first row


class Spoiled:
    """What one bad token of one array may change, in arrays of two rows, two key heads and two value heads each."""

    def __init__(self, arrays, name, own_states):
        by_key = name in ("q", "k") or (name in ("log_decay", "erase", "beta") and arrays[name].shape[2] == 2)
        heads = slice(0, 2) if by_key else slice(0, 1)
        document = slice(7, 15)
        self.out = np.zeros(arrays["v"].shape[:3], bool)
        self.out[ROW, TOKEN:15, heads] = True
        self.document = np.zeros_like(self.out)
        self.document[ROW, document, heads] = True
        self.state = np.zeros((2, 3, 4) if own_states else (2, 4), bool)
        if own_states:
            self.state[ROW, 1, heads] = True


def check_containment(actual, clean, spoiled):
    """Everything but what is spoiled is what it is without the bad token, bit for bit, and finite."""
    for name, x in actual.items():
        if name == "out":
            free = ~spoiled.out
        elif name in ("final_state", "d_initial_state"):
            free = ~spoiled.state
        else:
            group = spoiled.document.shape[2] // x.shape[2]
            free = ~spoiled.document.reshape(*x.shape[:3], group).any(axis=3)
        assert free.any() and np.isfinite(x[free]).all(), name
        np.testing.assert_array_equal(x[free], clean[name][free], err_msg=name)


BAD = (np.nan, np.inf, -np.inf, 1e30, -1e30, 1e-40, 3e38)


@pytest.mark.parametrize("own_states", [False, True], ids=["ids", "own states"])
@pytest.mark.parametrize("member, owner", [("gdn2", "key"), ("kda", "value"), ("sla", "key")])
@by_backend
def test_a_bad_token_changes_nothing_outside_its_document_and_heads(backend, member, owner, own_states):
    sizes = {"batch": 2, "time": 24, "heads": 2, "group": 2, "key_dim": 4, "value_dim": 4}
    arrays = random_inputs(member, 200, owner=owner, state=False, **sizes)
    lead = (2, 3) if own_states else (2,)
    arrays["initial_state"] = np.random.default_rng(201).standard_normal((*lead, 4, 4, 4)).astype(np.float32)
    d_out, d_final_state = random_cotangents(arrays, 202, states=lead)
    options = {"ids": IDS} | ({"num_segments": 3} if own_states else {})
    for name in arrays:
        if name == "initial_state":
            continue
        spoiled = Spoiled(arrays, name, own_states)
        cotangents = (
            np.where(spoiled.out[..., None], 0, d_out),
            np.where(spoiled.state[..., None, None], 0, d_final_state),
        )
        clean = run_with_gradients(arrays, cotangents, backend, **options)
        for bad in BAD:
            poisoned = {n: x.copy() for n, x in arrays.items()}
            poisoned[name][ROW, TOKEN, HEAD, -1] = bad
            actual = run_with_gradients(poisoned, cotangents, backend, **options)
            try:
                check_containment(actual, clean, spoiled)
            except AssertionError as failure:
                raise AssertionError(f"{name} = {bad}") from failure
