"""Bugs for `Plain`, each the essence of a real one, and the law that names it.

`FROM_REPORTS` were written from the public reports behind tests/cases, whose number each carries, before there was any
law; `OWN` are what else went wrong in kernels we read or wrote. A bug is what it changes in `Plain`: methods, or the
terms of a gradient that it leaves out.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax.custom_batching import custom_vmap

from gated_delta import gated_delta
from gated_delta.testing import Capabilities, Implementation

from .plain import Plain


class Bug(NamedTuple):
    law: str
    changes: dict[str, Any]
    case: str = ""

    def plant(self, name: str) -> Implementation:
        plain = type(name, (Plain,), self.changes)()
        right = Implementation("Plain()", Capabilities(), Plain())
        if self.law == "chunk_size":  # the implementation itself is right
            return dataclasses.replace(right, variations={name: dataclasses.replace(right, run=plain)})
        if self.law == "step":
            return dataclasses.replace(right, step=functools.partial(one_token, plain))
        return dataclasses.replace(right, run=plain)


def one_token(plain, q, k, v, gates, state):
    """`plain` on one token, whose arrays have no time axis."""
    q, k, v, gates = jax.tree.map(lambda x: np.asarray(x)[:, None], (q, k, v, gates))
    arguments = {"q": q, "k": k, "v": v, "gates": gates, "initial_state": state}
    results = plain(arguments, (np.zeros_like(v), np.zeros_like(state)))
    return results["out"][:, 0], results["final_state"]


def bf16(x):
    return np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float64)


def lower(pairs):
    rows, columns = np.indices((pairs.shape[2],) * 2)
    return (rows >= columns)[..., None]


def unmasked(sums):
    return sums[..., :, None, :] - sums[..., None, :, :]


def without(*terms):
    return {"without": frozenset(terms)}


# ---- from public reports ---------------------------------------------------------------------------------------------


def factored(self, sums):
    sums = np.float32(sums)
    product = np.exp(sums)[..., :, None, :] * np.exp(-sums)[..., None, :, :]
    return np.where(lower(sums), product, 0).astype(np.float64)


def clipped(self, sums):
    product = np.exp(sums)[..., :, None, :] * np.exp(np.minimum(-sums, 20))[..., None, :, :]
    return np.where(lower(sums), product, 0)


def one_anchor(self, sums):
    return np.float64(np.exp(np.float32(self.total(sums))) * np.exp(np.float32(-sums)))


def mask_after_exp(self, sums):
    return np.exp(np.float32(unmasked(sums))).astype(np.float64)


def zero_is_a_mark(self, arguments, results, d_wide, given):
    if given["log_decay"] is not None:
        zeros = np.broadcast_to(np.repeat(given["log_decay"] == 0, 1, 2), given["log_decay"].shape)
        repeat = d_wide["log_decay"].shape[2] // zeros.shape[2], d_wide["log_decay"].shape[3] // zeros.shape[3]
        d_wide["log_decay"] = np.where(np.repeat(np.repeat(zeros, repeat[0], 2), repeat[1], 3), 0, d_wide["log_decay"])
    return Plain.finish(self, arguments, results, d_wide, given)


def no_gate_no_gradient(self, tile, state, kept, d_out, d_after):
    d_tile, d_state = Plain.backward(self, tile, state, kept, d_out, d_after)
    if not tile["log_decay"].any():
        d_tile["k"] = d_tile["k"] - (kept[8] @ np.swapaxes(d_after, -1, -2)) * self.leaving(kept[0])
    return d_tile, d_state


def powers_of_two(self, sums):
    return np.swapaxes(np.exp2(self.total(sums)), 2, 3)


def padded_with_the_last_token(self, x, more):
    return np.pad(x, [(0, 0), (0, 0), (0, more), (0, 0)], mode="edge")


def padding_decays(self, x):
    x = np.swapaxes(x, 1, 2)
    return np.pad(
        x, [(0, 0), (0, 0), (0, -x.shape[2] % self.chunk), (0, 0)], constant_values=-0.05 if x.max() <= 0 else 0
    )


def last_whole_chunk(self, chunks, state):
    tokens = [tile["k"].any((0, 1, 3)) for tile, _, _ in chunks]
    return state if len(chunks) == 1 or tokens[-1].all() else chunks[-1][1]


def rubbish_in_padding(self, x, more):
    return np.pad(x, [(0, 0), (0, 0), (0, more), (0, 0)], constant_values=1e30)


def one_state_a_row(arguments):
    """Whether documents are packed by ids that share the state of their row."""
    return arguments.get("segment_ids") is not None and arguments.get("num_segments") is None


def boundary_not_passed_on(self, arguments, batch, time):
    found = Plain.documents(self, arguments, batch, time)
    if not one_state_a_row(arguments):
        return found
    ids = np.asarray(arguments["segment_ids"])
    return [
        (slice(r, r + 1), np.flatnonzero(ids[r] >= 0), slice(r, r + 1), True, True)
        for r in range(batch)
        if (ids[r] >= 0).any()
    ]


def empty_takes_the_neighbours_state(self, arguments, results, d_wide, given):
    if arguments.get("cu_seqlens") is not None:
        lengths = np.diff(arguments["cu_seqlens"])
        for i in np.flatnonzero(lengths[1:] == 0) + 1:
            results["final_state"][i] = results["final_state"][i - 1]
    return Plain.finish(self, arguments, results, d_wide, given)


def repeated_offsets_update(self, arguments, results, d_wide, given):
    if arguments.get("cu_seqlens") is not None:
        empty = np.diff(arguments["cu_seqlens"]) == 0
        results["final_state"][empty] *= 0.9
    return Plain.finish(self, arguments, results, d_wide, given)


def tail_never_written(self, shape):
    return np.full(shape, 3.0) if len(shape) == 4 else np.zeros(shape)


def chunks_counted_over_the_row(self, arguments, batch, time):
    found, left = [], -(-time // self.chunk)
    for rows, tokens, *rest in Plain.documents(self, arguments, batch, time):
        needed = -(-len(tokens) // self.chunk)
        found.append((rows, tokens[: left * self.chunk], *rest)) if left else None
        left = max(left - needed, 0)
    return found


def frozen_offsets(self, arguments, batch, time):
    kept = self.__dict__.setdefault("kept", {})
    name = "cu_seqlens" if arguments.get("cu_seqlens") is not None else "segment_ids"
    if arguments.get(name) is None:
        return Plain.documents(self, arguments, batch, time)
    key = (name, np.shape(arguments[name]), arguments.get("num_segments"))
    return Plain.documents(self, {**arguments, name: kept.setdefault(key, arguments[name])}, batch, time)


def state_only_for_one_token(self, state, tokens):
    return state if tokens == 1 else 0 * state


def transposed_where_square(self, chunks, state):
    return np.swapaxes(state, -1, -2) if state.shape[-1] == state.shape[-2] else state


def erase_reads_before_decay(self, state, tile):
    undecayed = {**tile, "erase": tile["erase"] * np.exp(-np.maximum(tile["log_decay"], -50))}
    return Plain.forward(self, state, undecayed)


def carry_in_bfloat16(self, state):
    return bf16(state)


def scale_of_none_is_one(self, arguments):
    return 1.0 if arguments.get("scale") is None else float(arguments["scale"])


def unguarded_norm(self, given, gates, heads, key_dim, value_dim):
    wide = Plain.widen(self, given, gates, heads, key_dim, value_dim)
    size = np.linalg.norm(wide["k"], axis=-1, keepdims=True)
    return {**wide, "k": wide["k"] / size}


def sums_in_bfloat16(self, log_decay):
    out, running = np.zeros_like(log_decay), 0
    for t in range(log_decay.shape[2]):
        running = out[:, :, t] = bf16(running + log_decay[:, :, t])
    return out


def inverse_in_bfloat16(self, pairs):
    return bf16(Plain.inverse(self, bf16(pairs)))


def keeps_the_callers_state(self, arguments, results, d_wide, given):
    state = arguments.get("initial_state")
    if state is not None and state.shape == results["final_state"].shape:
        state[...] = results["final_state"]
    return Plain.finish(self, arguments, results, d_wide, given)


def heads_in_turn(self, x, heads, width):
    return np.repeat(np.tile(x, (1, 1, heads // x.shape[2], 1)), width // x.shape[3], axis=3)


def first_of_the_group(self, d_wide, shape):
    batch, time, heads, dim = shape
    parts = d_wide.reshape(batch, time, heads, d_wide.shape[2] // heads, dim, d_wide.shape[3] // dim)
    return parts[:, :, :, 0].sum(-1)


def floor_division_back(self, d_wide, shape):
    heads = shape[2]
    whole = d_wide.shape[2] - d_wide.shape[2] % heads
    return Plain.narrow(self, d_wide[:, :, : max(whole, heads)], shape)


def floor_division(self, x, heads, width):
    whole = np.repeat(x, max(heads // x.shape[2], 1), axis=2)[:, :, :heads]
    whole = np.concatenate([whole, *[whole[:, :, -1:]] * (heads - whole.shape[2])], axis=2)
    return np.repeat(whole, width // x.shape[3], axis=3)


def many_cells(self, chunks, state):
    return state + np.nan if state.shape[0] * state.shape[1] * len(chunks) >= 1024 else state


def ids_in_a_byte(self, arguments, batch, time):
    ids = arguments.get("segment_ids")
    if ids is None:
        offsets = arguments.get("cu_seqlens")
        changes = {} if offsets is None else {"cu_seqlens": offsets[:256]}
        return Plain.documents(self, {**arguments, **changes}, batch, time)
    return Plain.documents(self, {**arguments, "segment_ids": np.asarray(ids).astype(np.int8).astype(int)}, batch, time)


def outputs_in_float32(self, arguments, results, d_wide, given):
    finished = Plain.finish(self, arguments, results, d_wide, given)
    return {**finished, "out": finished["out"].astype(np.float32)}


def state_in_the_dtype_of_values(self, arguments, results, d_wide, given):
    finished = Plain.finish(self, arguments, results, d_wide, given)
    return {**finished, "final_state": finished["final_state"].astype(arguments["v"].dtype)}


def loss_on_the_state_alone(self, tile, state, kept, d_out, d_after):
    return Plain.backward(self, tile, state, kept, d_out, d_after if d_out.any() else 0 * d_after)


FROM_REPORTS = {
    "one anchor for all tokens of a chunk": Bug("extreme_gates", {"leaving": one_anchor}, "C01"),
    "inverse decay clipped": Bug("extreme_gates", {"pair_decay": clipped}, "C02"),
    "factored exponent": Bug("extreme_gates", {"pair_decay": factored}, "C03"),
    "mask after exp": Bug("extreme_gates", {"pair_decay": mask_after_exp}, "C04"),
    "a log decay of zero is taken for none": Bug("gradients", {"finish": zero_is_a_mark}, "C05"),
    "gradient of keys skipped without a decay": Bug("gradients", {"backward": no_gate_no_gradient}, "C06"),
    "state decays by powers of two": Bug("recurrence", {"across": powers_of_two}, "C07"),
    "decay read at a padded slot": Bug("recurrence", {"lay_out": padding_decays}, "C10"),
    "last chunk padded with the last token": Bug("recurrence", {"pad": padded_with_the_last_token}, "C11"),
    "rubbish in a short chunk": Bug("recurrence", {"pad": rubbish_in_padding}, "C13"),
    "NaN from 1024 cells on": Bug("large_launch", {"leave": many_cells}, "C17"),
    "boundary not passed on": Bug("packing", {"documents": boundary_not_passed_on}, "C18"),
    "empty document takes its neighbour's state": Bug(
        "zero_length", {"finish": empty_takes_the_neighbours_state}, "C19"
    ),
    "repeated offsets update a state": Bug("zero_length", {"finish": repeated_offsets_update}, "C20"),
    "tail never written": Bug("padding", {"empty": tail_never_written}, "C21"),
    "chunks counted over the row": Bug("packing", {"documents": chunks_counted_over_the_row}, "C22"),
    "document numbers in a byte": Bug("large_launch", {"documents": ids_in_a_byte}, "C23"),
    "offsets of the first call": Bug("new_documents", {"documents": frozen_offsets}, "C26"),
    "carried state ignored": Bug("resume", {"begin": state_only_for_one_token}, "C27"),
    "state transposed where it is square": Bug("state_layout", {"leave": transposed_where_square}, "C28"),
    "erase reads before decay": Bug("recurrence", {"forward": erase_reads_before_decay}, "C29"),
    "state after the last whole chunk": Bug("resume", {"leave": last_whole_chunk}, "C30"),
    "carry in bfloat16": Bug("recurrence", {"carry": carry_in_bfloat16}, "C31"),
    "state returned in the dtype of values": Bug("dtypes", {"finish": state_in_the_dtype_of_values}, "C31"),
    "caller's state overwritten": Bug("determinism", {"finish": keeps_the_callers_state}, "C32"),
    "no scale is a scale of one": Bug("defaults", {"scale": scale_of_none_is_one}, "C33"),
    "no gradient for a loss on the state alone": Bug("partial_losses", {"backward": loss_on_the_state_alone}, "C33"),
    "norm of a zero key": Bug("ill_conditioned_keys", {"widen": unguarded_norm}, "C34"),
    "gradient of beta from its erase alone": Bug("gradients", without("write of beta"), "C35"),
    "gradient of erase from the pairs alone": Bug("finite_differences", without("erase of state"), "C35"),
    "gradient of write missing": Bug("gradients", without("write"), "C35"),
    "sums of decay in bfloat16": Bug("long_memory", {"sums": sums_in_bfloat16}, "C39"),
    "inverse in bfloat16": Bug("chunk_inverse", {"inverse": inverse_in_bfloat16}, "C40"),
    "head index modulo heads": Bug("grouping", {"spread": heads_in_turn}, "C55"),
    "gradient of the first head of a group": Bug("grouping", {"narrow": first_of_the_group}, "C55"),
    "heads that do not divide are rounded down": Bug(
        "refusals", {"spread": floor_division, "narrow": floor_division_back}, "C56"
    ),
}


# ---- our own ---------------------------------------------------------------------------------------------------------


def erase_and_write_swapped(self, given, gates, heads, key_dim, value_dim):
    if not gates.is_tied and given["erase"] is not None and given["write"] is not None:
        if given["erase"].shape[3] == given["write"].shape[3]:
            given = {**given, "erase": given["write"], "write": given["erase"]}
    return Plain.widen(self, given, gates, heads, key_dim, value_dim)


def without_the_token_itself(self, pairs):
    return np.tril(pairs, -1)


def pairs_with_itself(self, pairs):
    return np.tril(pairs)


def solved_with_itself(self, pairs):
    return np.linalg.inv(np.eye(pairs.shape[-1]) + np.tril(pairs))


def power_series(self, pairs):
    eye = np.eye(pairs.shape[-1])
    out, power = np.float32(eye - pairs), np.float32(pairs)
    for _ in range(3):
        power = power @ power
        out = out @ (np.float32(eye) + power)
    return out.astype(np.float64)


def truncated_series(self, pairs):
    return np.eye(pairs.shape[-1]) - pairs + pairs @ pairs


def reset_in_the_first_chunk_only(self, arguments, batch, time):
    if arguments.get("segment_ids") is None or arguments.get("num_segments") is not None:
        return Plain.documents(self, arguments, batch, time)
    ids = np.array(arguments["segment_ids"])
    for row in ids:
        last = row[self.chunk - 1 : self.chunk]
        if last.size and last[0] >= 0:
            row[self.chunk :][row[self.chunk :] >= 0] = last[0]
    return Plain.documents(self, {**arguments, "segment_ids": ids}, batch, time)


def documents_share_states(self, arguments, batch, time):
    found = Plain.documents(self, arguments, batch, time)
    if arguments.get("num_segments") is None:
        return found
    return [(rows, tokens, (state[0], 0), *ends) for rows, tokens, state, *ends in found]


def states_in_reverse(self, arguments, results, d_wide, given):
    if arguments.get("num_segments") is not None:
        results["final_state"] = results["final_state"][:, ::-1]
    return Plain.finish(self, arguments, results, d_wide, given)


def scratch_not_cleared(self, state, tokens):
    left, self.left = self.__dict__.get("left"), np.full_like(state, 1e-3)
    return state if left is None or left.shape != state.shape else state + left


def sum_over_rows(self, arguments, results, d_wide, given):
    rows = d_wide["k"].shape[0]
    d_wide["k"] = d_wide["k"] + (0 if rows == 1 else 1e-4 * d_wide["k"].sum(0, keepdims=True))
    return Plain.finish(self, arguments, results, d_wide, given)


def key_owner_for_value_gates(self, given, gates, heads, key_dim, value_dim):
    owners = given["k"].shape[2]
    taken = dict(given)
    for name in ("log_decay", "erase"):
        x = given[name]
        if x is not None and x.shape[2] == heads != owners:
            taken[name] = x[:, :, :: heads // owners]
    return Plain.widen(self, taken, gates, heads, key_dim, value_dim)


def tiles_in_turn(self, x, heads, width):
    return np.tile(np.repeat(x, heads // x.shape[2], axis=2), (1, 1, 1, width // x.shape[3]))


def write_gate_forgotten(self, given, gates, heads, key_dim, value_dim):
    wide = Plain.widen(self, given, gates, heads, key_dim, value_dim)
    return {**wide, "write": wide["write"] if gates.is_tied else np.ones_like(wide["write"])}


def read_before_write(self, state, tile):
    out, *rest = Plain.forward(self, state, tile)
    q, k = tile["q"], tile["k"]
    update = rest[1][8]
    return out - np.sum(q * k, -1, keepdims=True) * update, *rest


def reset_forgets_the_token_too(self, state, tile):
    gone = tile["log_decay"].min(-1, keepdims=True) <= -100
    return Plain.forward(self, state, {**tile, "v": np.where(gone, 0, tile["v"])})


def decay_limited_to_five(self, log_decay):
    return np.cumsum(np.maximum(log_decay, -5), axis=2)


def reference_row_from_the_future(self, sums):
    """Right but for the last bits, which depend on the last row."""
    up, down = np.exp(np.float32(sums - sums[:, :, -1:])), np.exp(np.float32(sums[:, :, -1:] - sums))
    return np.where(lower(sums), up[..., :, None, :] * down[..., None, :, :], 0).astype(np.float64)


def scaled_by_the_largest(self, given, gates, heads, key_dim, value_dim):
    wide = Plain.widen(self, given, gates, heads, key_dim, value_dim)
    largest = np.abs(np.nan_to_num(wide["v"], posinf=0, neginf=0)).max() + 1
    return {**wide, "v": np.float64(np.float32(wide["v"] / largest)) * largest}


def documents_masked_by_a_product(self, wide):
    """Every token reads every other of its row with a weight of zero."""
    return {**wide, "v": wide["v"] + 0 * wide["v"].sum(1, keepdims=True)}


def padding_is_a_token(self, arguments, batch, time):
    if arguments.get("segment_ids") is None:
        return Plain.documents(self, arguments, batch, time)
    ids = np.asarray(arguments["segment_ids"])
    filled = np.maximum.accumulate(np.where(ids < 0, -1, ids), axis=1)
    return Plain.documents(self, {**arguments, "segment_ids": filled}, batch, time)


def packed_rows_begin_empty(self, arguments, dims):
    return Plain.entry(self, arguments, dims) * (not one_state_a_row(arguments))


def boundary_at_a_chunk_start_missed(self, arguments, batch, time):
    if not one_state_a_row(arguments):
        return Plain.documents(self, arguments, batch, time)
    ids = np.array(arguments["segment_ids"])
    for start in range(self.chunk, time, self.chunk):
        for row in ids:
            if row[start - 1] >= 0 and row[start] >= 0:
                row[row == row[start]] = row[start - 1]
    return Plain.documents(self, {**arguments, "segment_ids": ids}, batch, time)


def random_order(self, state, tile):
    out, after, kept = Plain.forward(self, state, tile)
    return out * (1 + 1e-6 * np.random.default_rng().standard_normal()), after, kept


def groups_laid_out_value_first(self, arguments, results, d_wide, given):
    heads, owners = given["v"].shape[2], given["k"].shape[2]
    order = np.arange(heads).reshape(owners, -1).T.ravel()
    results["out"] = results["out"][:, :, order]
    return Plain.finish(self, arguments, results, d_wide, given)


def gradient_in_float32(self, arguments, results, d_wide, given):
    finished = Plain.finish(self, arguments, results, d_wide, given)
    return {name: x if not name.startswith("d_") else x.astype(np.float32) for name, x in finished.items()}


def scale_of_outputs_too(self, arguments, results, d_wide, given):
    if arguments.get("scale") is not None:
        results["out"] = results["out"] * float(arguments["scale"])
    return Plain.finish(self, arguments, results, d_wide, given)


def idle_tokens_decay(self, state, tile):
    idle = ~tile["k"].any(-1, keepdims=True) & (tile["log_decay"] == 0).all(-1, keepdims=True)
    return Plain.forward(self, state, {**tile, "log_decay": np.where(idle, -0.01, tile["log_decay"])})


def channel_decays_in_bfloat16(self, given, gates, heads, key_dim, value_dim):
    decay = given["log_decay"]
    if decay is not None and decay.shape[3] == key_dim:
        given = {**given, "log_decay": bf16(decay)}
    return Plain.widen(self, given, gates, heads, key_dim, value_dim)


def absent_documents_lose_their_state(self, arguments, results, d_wide, given):
    if arguments.get("num_segments") is not None:
        for row, ids in enumerate(arguments["segment_ids"]):
            absent = ~np.isin(np.arange(arguments["num_segments"]), ids)
            results["final_state"][row, absent] = 0
    return Plain.finish(self, arguments, results, d_wide, given)


def in_small_chunks(self, pairs):
    return np.eye(pairs.shape[-1]) - pairs


def state_before_its_decay(self, sums):
    return np.ones_like(np.swapaxes(sums[:, :, -1:], 2, 3))


def head_decays_of_key_heads_in_turn(self, given, gates, heads, key_dim, value_dim):
    decay, owners = given["log_decay"], given["k"].shape[2]
    if decay is not None and decay.shape[2:] == (owners, 1):
        given = {**given, "log_decay": np.tile(decay, (1, 1, heads // owners, 1))}
    return Plain.widen(self, given, gates, heads, key_dim, value_dim)


def keys_wrong_beyond_sixteen_channels(self, given, gates, heads, key_dim, value_dim):
    wide = Plain.widen(self, given, gates, heads, key_dim, value_dim)
    return {**wide, "k": 1.1 * wide["k"]} if key_dim > 16 else wide


def beta_from(wide, start, factor):
    late = (np.arange(wide["v"].shape[1]) >= start)[:, None, None]
    return {**wide, **{name: np.where(late, factor, 1) * wide[name] for name in ("erase", "write")}}


def beta_halved_from_token_131(self, given, gates, heads, key_dim, value_dim):
    return beta_from(Plain.widen(self, given, gates, heads, key_dim, value_dim), 131, 0.5)


def no_beta_in_a_short_last_launch_of_256(self, given, gates, heads, key_dim, value_dim):
    wide = Plain.widen(self, given, gates, heads, key_dim, value_dim)
    time = wide["v"].shape[1]
    return beta_from(wide, time // 256 * 256, 0) if time > 256 and time % 256 else wide


OWN = {
    "erase and write swapped": Bug("shapes", {"widen": erase_and_write_swapped}),
    "scores without the token itself": Bug("recurrence", {"until": without_the_token_itself}),
    "a token erases by itself": Bug("recurrence", {"before": pairs_with_itself, "inverse": solved_with_itself}),
    "power series in float32": Bug("chunk_inverse", {"inverse": power_series}),
    "truncated series": Bug("chunk_inverse", {"inverse": truncated_series}),
    "reset in the first chunk only": Bug("packing", {"documents": reset_in_the_first_chunk_only}),
    "documents share one state": Bug("packing", {"documents": documents_share_states}),
    "packed rows begin with an empty state": Bug("packing", {"entry": packed_rows_begin_empty}),
    "boundary at the start of a chunk missed": Bug("packing", {"documents": boundary_at_a_chunk_start_missed}),
    "states of documents in reverse": Bug("packing", {"finish": states_in_reverse}),
    "scratch not cleared": Bug("unwritten_memory", {"begin": scratch_not_cleared}),
    "sum over a parallel axis": Bug("no_leak_between_rows", {"finish": sum_over_rows}),
    "gates of the key head for value heads": Bug("recurrence", {"widen": key_owner_for_value_gates}),
    "tiles in turn": Bug("recurrence", {"spread": tiles_in_turn}),
    "write gate forgotten": Bug("recurrence", {"widen": write_gate_forgotten}),
    "read before write": Bug("recurrence", {"forward": read_before_write}),
    "a reset forgets its own token": Bug("extreme_gates", {"forward": reset_forgets_the_token_too}),
    "decay limited to five nats": Bug("extreme_gates", {"sums": decay_limited_to_five}),
    "reference row from the future": Bug("causality", {"pair_decay": reference_row_from_the_future}),
    "values rounded beside the largest of all rows": Bug("no_leak_between_heads", {"widen": scaled_by_the_largest}),
    "documents masked by a product": Bug("no_leak_between_documents", {"contain": documents_masked_by_a_product}),
    "padding is a token": Bug("padding", {"documents": padding_is_a_token}),
    "a different order every time": Bug("determinism", {"forward": random_order}),
    "groups laid out with the value first": Bug("recurrence", {"finish": groups_laid_out_value_first}),
    "gradients in float32": Bug("dtypes", {"finish": gradient_in_float32}),
    "outputs scaled twice": Bug("scale", {"finish": scale_of_outputs_too}),
    "no gradient to the initial state": Bug("finite_differences", without("initial state")),
    "no gradient from a state to what came before": Bug("finite_differences", without("state in outputs")),
    "no gradient to decay from pairs": Bug("gradients", without("decay in pairs")),
    "no gradient to decay from the state": Bug("gradients", without("decay of state")),
    "no gradient to keys from scores": Bug("gradients", without("key in scores")),
    "no gradient through the erase to keys": Bug("finite_differences", without("key in erase")),
    "idle tokens decay": Bug("neutral_tokens", {"forward": idle_tokens_decay}),
    "decays per channel in bfloat16": Bug("reductions", {"widen": channel_decays_in_bfloat16}),
    "absent documents lose their state": Bug("resume_documents", {"finish": absent_documents_lose_their_state}),
    "another chunk size is solved to first order": Bug("chunk_size", {"inverse": in_small_chunks}, "C12"),
    "a step does not decay its state": Bug("step", {"across": state_before_its_decay}),
    "decays of key heads in turn": Bug("recurrence", {"widen": head_decays_of_key_heads_in_turn}),
    "keys wrong beyond 16 channels": Bug("recurrence", {"widen": keys_wrong_beyond_sixteen_channels}),
    "beta halved from token 131 on": Bug("recurrence", {"widen": beta_halved_from_token_131}),
    "no beta in a short last launch of 256": Bug("recurrence", {"widen": no_beta_in_a_short_last_launch_of_256}),
}


# ---- of functions that JAX traces ------------------------------------------------------------------------------------


@custom_vmap
def batched_wrongly(arguments):
    return gated_delta(**arguments)


@batched_wrongly.def_vmap
def _(size, is_batched, arguments):
    """The first of the batch for all."""
    out, state = gated_delta(**jax.tree.map(lambda x, batched: x[0] if batched else x, arguments, is_batched[0]))
    return jax.tree.map(lambda x: jax.numpy.broadcast_to(x, (size, *x.shape)), (out, state)), (True, True)


TRACED = {
    "batching rule takes the first for all": ("transforms", lambda **arguments: batched_wrongly(arguments)),
}
