"""A plain chunked implementation in NumPy with its gradient written out: what bugs are planted into.

It is called as `gated_delta.testing.results` is, without a backend: `Plain()(arguments, cotangents)`. Every step that
somebody got wrong once is a method of its own, and every term of a gradient has a name under which it can be left out.
"""

import itertools
from typing import ClassVar

import numpy as np

TOKENS = ("q", "k", "v", "log_decay", "erase", "write")


class Plain:
    chunk = 16
    without: ClassVar[frozenset[str]] = frozenset()  # names of gradient terms left out

    def __call__(self, arguments, cotangents):
        with np.errstate(all="ignore"):
            return self.finish(arguments, *self.run(arguments, cotangents))

    def run(self, arguments, cotangents):
        """Results in float64, gradients at full width, and the arrays as they were given."""
        gates = arguments["gates"]
        given = {name: arguments.get(name, getattr(gates, name, None)) for name in TOKENS}
        given = {name: None if x is None else np.asarray(x).astype(np.float64) for name, x in given.items()}
        batch, time, heads, value_dim = given["v"].shape
        key_dim, scale = given["k"].shape[-1], self.scale(arguments)
        wide = self.contain(self.widen(given, gates, heads, key_dim, value_dim))
        begin = self.entry(arguments, (heads, key_dim, value_dim))
        d_out, d_final = (np.asarray(x).astype(np.float64) for x in cotangents)
        out, final = self.empty((batch, time, heads, value_dim)), begin.copy()
        d_wide = {name: self.empty(x.shape) for name, x in wide.items()}
        d_begin = d_final.copy()
        for rows, tokens, state, enters, leaves in self.documents(arguments, batch, time):
            cut = {name: self.lay_out(x[rows][:, tokens]) for name, x in wide.items()}
            cut["q"] = scale * cut["q"]
            into = self.begin(begin[state], len(tokens)) if enters else 0 * final[state]
            states, outs, chunks = into, [], []
            for start in range(0, cut["q"].shape[2], self.chunk):
                tile = {name: x[:, :, start : start + self.chunk] for name, x in cut.items()}
                value, after, kept = self.forward(states, tile)
                outs.append(value)
                chunks.append((tile, states, kept))
                states = self.carry(after)
            out[rows, tokens] = self.lay_back(outs, len(tokens))
            if leaves:
                final[state] = self.leave(chunks, states)
            d_outs = self.lay_out(d_out[rows][:, tokens])
            d_state = d_final[state] if leaves else 0 * d_final[state]
            pieces = []
            for index in reversed(range(len(chunks))):
                tile, entering, kept = chunks[index]
                d_value = d_outs[:, :, index * self.chunk : (index + 1) * self.chunk]
                d_tile, d_state = self.backward(tile, entering, kept, d_value, d_state)
                pieces.append(d_tile)
            for name, target in d_wide.items():
                target[rows, tokens] = self.lay_back([piece[name] for piece in reversed(pieces)], len(tokens))
            if enters:
                d_begin[state] = self.term("initial state", d_state)
        d_wide["q"] = scale * d_wide["q"]
        return {"out": out, "final_state": final}, {**d_wide, "initial_state": d_begin}, given

    # ---- arguments

    def scale(self, arguments):
        scale = arguments.get("scale")
        return arguments["k"].shape[-1] ** -0.5 if scale is None else float(scale)

    def entry(self, arguments, dims):
        batch = arguments["v"].shape[0]
        states = (batch,)
        if arguments.get("cu_seqlens") is not None:
            states = (len(arguments["cu_seqlens"]) - 1,)
        elif arguments.get("num_segments") is not None:
            states = (batch, arguments["num_segments"])
        state = arguments.get("initial_state")
        return np.zeros((*states, *dims)) if state is None else np.array(state).astype(np.float64)

    def begin(self, state, tokens):
        return state

    def spread(self, x, heads, width):
        return np.repeat(np.repeat(x, heads // x.shape[2], axis=2), width // x.shape[3], axis=3)

    def widen(self, given, gates, heads, key_dim, value_dim):
        write = given["erase"] if gates.is_tied else given["write"]
        shape = given["v"].shape[:2]

        def wide(x, width, absent):
            return np.full((*shape, heads, width), absent) if x is None else self.spread(x, heads, width)

        return {
            "q": wide(given["q"], key_dim, 0),
            "k": wide(given["k"], key_dim, 0),
            "v": wide(given["v"], value_dim, 0),
            "log_decay": np.maximum(wide(given["log_decay"], key_dim, 0.0), -200),  # exp is 0 there, and sums are safe
            "erase": wide(given["erase"], key_dim, 0.0),
            "write": wide(write, value_dim, 1.0),
        }

    def contain(self, wide):
        """Where a token is not finite: nothing is left of it but a value of NaN, which its followers read."""
        bad = ~np.all([np.isfinite(x).all(-1) for x in wide.values()], axis=0)[..., None]
        wide = {name: np.where(bad, 0, x) for name, x in wide.items()}
        return {**wide, "v": np.where(bad, np.nan, wide["v"])} if bad.any() else wide

    def documents(self, arguments, batch, time):
        """Rows, tokens, index of the state, whether that is where the document begins and what it leaves."""
        every = slice(None)
        if arguments.get("cu_seqlens") is not None:
            offsets = np.asarray(arguments["cu_seqlens"])
            pairs = enumerate(itertools.pairwise(offsets))
            return [(every, np.arange(a, b), slice(i, i + 1), True, True) for i, (a, b) in pairs if b > a]
        if arguments.get("segment_ids") is None:
            return [(every, np.arange(time), every, True, True)] if time else []
        found = []
        for row, ids in enumerate(np.asarray(arguments["segment_ids"])):
            present = np.unique(ids[ids >= 0])
            rows = slice(row, row + 1)
            for document in present:
                tokens = np.flatnonzero(ids == document)
                if arguments.get("num_segments") is None:
                    ends = document == present[0], document == present[-1]
                    found.append((rows, tokens, rows, *map(bool, ends)))
                else:
                    found.append((rows, tokens, (rows, int(document)), True, True))
        return found

    # ---- chunks: [rows, heads, tokens, dim]

    def empty(self, shape):
        return np.zeros(shape)

    def pad(self, x, more):
        return np.pad(x, [(0, 0), (0, 0), (0, more), (0, 0)])

    def lay_out(self, x):
        return self.pad(np.swapaxes(x, 1, 2), -x.shape[1] % self.chunk)

    def lay_back(self, pieces, tokens):
        return np.swapaxes(np.concatenate(pieces, axis=2)[:, :, :tokens], 1, 2)

    def sums(self, log_decay):
        return np.cumsum(log_decay, axis=2)

    def total(self, sums):
        return sums[:, :, -1:]

    def pair_decay(self, sums):
        """Decay between two tokens `[..., later, earlier, key_dim]`, 0 where the second is the later one."""
        rows, columns = np.indices((sums.shape[2],) * 2)
        keep = (rows >= columns)[..., None]
        return np.where(keep, np.exp(np.where(keep, sums[..., :, None, :] - sums[..., None, :, :], 0)), 0)

    def before(self, pairs):
        return np.tril(pairs, -1)

    def until(self, pairs):
        return np.tril(pairs)

    def inverse(self, pairs):
        """Of the unit matrix plus `pairs`, row by row."""
        out = np.zeros_like(pairs)
        for i, unit in enumerate(np.eye(pairs.shape[-1])):
            out[..., i, :] = unit - (pairs[..., i : i + 1, :i] @ out[..., :i, :])[..., 0, :]
        return out

    def entering(self, sums):
        return np.exp(sums)

    def leaving(self, sums):
        return np.exp(self.total(sums) - sums)

    def across(self, sums):
        """Decay of the state over the whole chunk `[..., key_dim, 1]`."""
        return np.swapaxes(np.exp(self.total(sums)), 2, 3)

    def carry(self, state):
        return state

    def leave(self, chunks, state):
        return state

    def forward(self, state, tile):
        sums = self.sums(tile["log_decay"])
        pairs = self.pair_decay(sums)
        erase, value = tile["erase"] * tile["k"], tile["write"] * tile["v"]
        solve = self.inverse(self.before(np.einsum("rhik,rhjk,rhijk->rhij", erase, tile["k"], pairs)))
        scores = self.until(np.einsum("rhik,rhjk,rhijk->rhij", tile["q"], tile["k"], pairs))
        old, read = erase * self.entering(sums), tile["q"] * self.entering(sums)
        new = tile["k"] * self.leaving(sums)
        update = solve @ (value - old @ state)
        out = read @ state + scores @ update
        after = self.across(sums) * state + np.swapaxes(new, 2, 3) @ update
        return out, after, (sums, pairs, erase, solve, scores, old, read, new, update)

    def backward(self, tile, state, kept, d_out, d_after):
        sums, pairs, erase, solve, scores, old, read, new, update = kept
        term, q, k = self.term, tile["q"], tile["k"]
        d_update = term("update in outputs", self.t(scores) @ d_out) + term("update in state", new @ d_after)
        d_value = self.t(solve) @ d_update
        d_scores = self.until(d_out @ self.t(update))
        d_pairs = -self.before(d_value @ self.t(update))
        d_read, d_new, d_old = d_out @ self.t(state), update @ self.t(d_after), -d_value @ self.t(state)
        d_state = self.across(sums) * d_after
        d_state += term("state in outputs", self.t(read) @ d_out) - term("state in update", self.t(old) @ d_value)

        by_score = np.einsum("rhij,rhijk->rhijk", d_scores, pairs)
        by_pair = np.einsum("rhij,rhijk->rhijk", d_pairs, pairs)
        d_q = np.einsum("rhijk,rhjk->rhik", by_score, k) + d_read * self.entering(sums)
        d_erase = term("erase in pairs", np.einsum("rhijk,rhjk->rhik", by_pair, k))
        d_erase = d_erase + term("erase of state", d_old * self.entering(sums))
        d_k = term("key in scores", np.einsum("rhijk,rhik->rhjk", by_score, q))
        d_k = d_k + term("key in pairs", np.einsum("rhijk,rhik->rhjk", by_pair, erase))
        d_k = d_k + term("key in state", d_new * self.leaving(sums)) + term("key in erase", d_erase * tile["erase"])

        moved = np.einsum("rhijk,rhik,rhjk->rhijk", by_score, q, k)
        moved = term("decay in scores", moved)
        moved = moved + term("decay in pairs", by_pair * erase[..., :, None, :] * k[..., None, :, :])
        d_sums = moved.sum(3) - moved.sum(2)
        d_sums += term("decay on entry", d_read * read + d_old * old)
        at_end = term("decay on leaving", d_new * new)
        d_sums -= at_end
        across = np.sum(self.across(sums) * d_after * state, axis=3)[:, :, None]
        d_sums[:, :, -1:] += at_end.sum(2, keepdims=True) + term("decay of state", across)
        d_tile = {
            "q": d_q,
            "k": d_k,
            "v": tile["write"] * d_value,
            "log_decay": np.cumsum(d_sums[:, :, ::-1], axis=2)[:, :, ::-1],
            "erase": d_erase * k,
            "write": term("write", d_value * tile["v"]),
        }
        return d_tile, d_state

    def t(self, x):
        return np.swapaxes(x, -1, -2)

    def term(self, name, x):
        return 0 * x if name in self.without else x

    # ---- results

    def narrow(self, d_wide, shape):
        batch, time, heads, dim = shape
        return d_wide.reshape(batch, time, heads, d_wide.shape[2] // heads, dim, d_wide.shape[3] // dim).sum((3, 5))

    def finish(self, arguments, results, d_wide, given):
        gates = arguments["gates"]
        operands = {str(np.asarray(arguments[name]).dtype) for name in "qkv"}
        wide = np.float64 if "float64" in operands else np.float32
        results["out"] = results["out"].astype(arguments["v"].dtype)
        results["final_state"] = results["final_state"].astype(wide)
        for name, x in given.items():
            if x is not None:
                d_x = self.narrow(d_wide[name], x.shape)
                if name == "erase" and gates.is_tied:
                    d_x = d_x + self.term("write of beta", self.narrow(d_wide["write"], x.shape))
                dtype = np.asarray(arguments.get(name, getattr(gates, name, None))).dtype
                results[f"d_{name}"] = d_x.astype(dtype)
        if arguments.get("initial_state") is not None:
            results["d_initial_state"] = d_wide["initial_state"].astype(arguments["initial_state"].dtype)
        return results
