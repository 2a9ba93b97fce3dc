"""The schedule tool: small programs written by hand, one that libtpu wrote, and, where libtpu is installed, functions
whose figures are known."""

import importlib.util
import inspect
import json
import pathlib
import subprocess
import sys
import textwrap

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from tpu import dump, report  # noqa: E402
from tpu.compile import LABELS, load  # noqa: E402
from tpu.machine import Machine, Pointer  # noqa: E402
from tpu_peers import ROWS  # noqa: E402
from tpu_schedule import parse_function  # noqa: E402

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install 'gated-delta[tpu]'"
)


def machine(program: str, delay_slots: int = 1, **settings) -> Machine:
    """A machine for bundles given one a line, without their addresses and braces."""
    lines = textwrap.dedent(program).strip().splitlines()
    text = "\n".join(f" {b:#x}   :  {{ {line} }}" for b, line in enumerate(lines))
    return Machine("hand", dump.read_bundles(text), delay_slots, **settings)


LOOP = """
    %s1_s0 = smov 0
    %s3_s0 = sphi %s1_s0, %s4_s0  ;;  %s4_s0 = sadd.s32 1, %s3_s0
    %p5_p0 = scmp.ge.s32.totalorder %s4_s0, 5
    %9 = sbr.rel (!%p5_p0) target bundleno = 1 (0x1), region = 2
    %v1_v0 = vmov 0.0
    %v2_v0 = vmov 1.0
"""


def test_a_loop_runs_as_often_as_its_counter_says_with_its_delay_slots():
    assert machine(LOOP, delay_slots=1).run() == [1, 5, 5, 5, 5, 1]
    assert machine(LOOP, delay_slots=2).run() == [1, 5, 5, 5, 5, 5]


def test_a_phi_is_its_register_also_after_a_branch_around_one_of_its_values():
    """In the first pass the value comes from inside the branch, in later ones from before it."""
    counts = machine(
        """
        %s1_s0 = smov 0  ;;  %s2_s1 = smov 7
        %s3_s0 = sphi %s1_s0, %s8_s0  ;;  %s4_s1 = sphi %s2_s1, %s7_s1  ;;  %s8_s0 = sadd.s32 1, %s3_s0
        %p5_p0 = scmp.ne.s32.totalorder %s3_s0, 0
        %20 = sbr.rel (%p5_p0) target bundleno = 6 (0x6), region = 1
        %v1_v0 = vmov 0.0
        %s6_s1 = sadd.s32 1, %s4_s1
        %s7_s1 = sphi %s4_s1, %s6_s1  ;;  %p9_p1 = scmp.ge.s32.totalorder %s8_s0, 3
        %21 = sbr.rel (!%p9_p1) target bundleno = 1 (0x1), region = 1
        %v2_v0 = vmov 0.0
        %p10_p2 = scmp.eq.s32.totalorder %s7_s1, 8
        %22 = sbr.rel (!%p10_p2) target bundleno = 13 (0xd), region = 1
        %v3_v0 = vmov 0.0
        %v4_v0 = vmov 0.0
        %v5_v0 = vmov 0.0
        """
    ).run()
    assert counts == [1, 3, 3, 3, 3, 1, 3, 3, 3, 1, 1, 1, 1, 1]


def test_guarded_moves_and_spilled_registers_keep_what_the_guard_leaves():
    counts = machine(
        """
        %s1_s0 = smov 3  ;;  %s2_s1 = smov 5  ;;  %p3_p0 = scmp.lt.s32.totalorder 4294967295, 0
        %s4_s0 = smov (!%p3_p0, %s1_s0), %s2_s1 /* not done: -1 is less than 0 */
        %9 = sst [smem:[#allocation7_spill]] /*sx=*/%s4_s0
        %s5_s2 = sld [smem:[#allocation7_spill]] (%p3_p0)
        %p6_p1 = scmp.eq.u32.totalorder %s5_s2, 3
        %10 = sbr.rel (!%p6_p1) target bundleno = 8 (0x8), region = 1
        %v1_v0 = vmov 0.0
        %v2_v0 = vmov 0.0
        %v3_v0 = vmov 0.0
        """
    ).run()
    assert counts == [1] * 9


def test_addresses_within_one_array_compare_and_subtract():
    result = machine(
        """
        %s1_s0 = scalar_lea.hbm [#allocation3], 64
        %s2_s1 = ssub.s32 %s1_s0, [#allocation3]  ;;  %p3_p0 = scmp.lt.u32.totalorder [#allocation3], %s1_s0
        %9 = dma.hbm_to_vmem [thread:$0]  (%p3_p0), /*hbm=*/%s1_s0, /*size_in_granules=*/%s2_s1, /*vmem=*/[#allocation4]
        """
    )
    result.run()
    assert result.values["s2_s1"] == 64 and result.read_bytes == 64 * 32 and result.written_bytes == 0


def test_what_hangs_on_data_is_named_until_it_is_settled():
    program = """
        %s1_s0 = spop %77
        %p2_p0 = scmp.gt.f32.partialorder %s1_s0, 1.0
        %9 = sbr.rel (%p2_p0) target bundleno = 5 (0x5), region = 1
        %v1_v0 = vmov 0.0
        %v2_v0 = vmov 0.0
        %p3_p1 = scmp.gt.s32.totalorder %s1_s0, 4
        %10 = sbr.rel (!%p3_p1) target bundleno = 5 (0x5), region = 2
        %v3_v0 = vmov 0.0
    """
    undecided = machine(program)
    undecided.run()
    jump, loop = undecided.unsettled
    assert (
        str(jump) == "hand:0, a jump over 3 bundles from 0x2 to 0x5, by `%p2_p0 = scmp.gt.f32.partialorder %s1_s0, 1.0`"
    )
    assert (jump.index, jump.is_loop, loop.index, loop.is_loop) == (0, False, 1, True)
    for choice, guarded in (("run", 1), ("skip", 0)):
        decided = machine(program, settle=lambda branch, choice=choice: 6 if branch.is_loop else choice)
        assert decided.run() == [1, 1, 1, 1, guarded, 6, 6, 6]
        assert list(decided.settled.values()) == [choice, 6] and not decided.unsettled
    with pytest.raises(ValueError, match=r"'run' does not settle hand:1, a loop back"):
        machine(program, settle=lambda branch: "run").run()


def test_a_store_to_an_unknown_place_makes_memory_unknown_but_for_kept_registers():
    result = machine(
        """
        %1 = sst [smem:[#allocation1 + $0x2]] /*sx=*/5
        %2 = sst [smem:[#allocation2_spill]] /*sx=*/6
        %s3_s0 = spop %77
        %4 = sst [smem:[%s3_s0]] /*sx=*/7
        %s5_s1 = sld [smem:[#allocation1 + $0x2]]  ;;  %s6_s2 = sld [smem:[#allocation2_spill]]
        %p7_p0 = scmp.eq.s32.totalorder %s5_s1, %s6_s2
        %8 = sbr.rel (%p7_p0) target bundleno = 8 (0x8), region = 1
        %v1_v0 = vmov 0.0
        %v2_v0 = vmov 0.0
        """
    )
    result.run()
    assert len(result.unsettled) == 1 and result.memory == {Pointer("#allocation2_spill", 0): 6}


def test_a_bundle_with_multiline_comments_and_calls_is_read():
    text = """
 0x1   : > { %7 = inlined_call %s1_s0, 4 /* %fusion.3 = fusion(%x.1, %y), kind=kLoop */ }
 0x2 PF: >> { %8 = dma.vmem_to_hbm [thread:$0]  (!%p2_p1), /*vmem=*/%s3_s3, /*size_in_granules=*/128, /*hbm=*/%s4_s4 /*
base_bounds: (16, 1)
} */ }
 0x3   :  {}
"""
    (call,), (copy,), empty = dump.read_bundles(text)
    assert (call.callee, call.args) == ("fusion.3", ("%s1_s0", "4"))
    assert (copy.op, copy.size, copy.guard, copy.negated) == ("dma.vmem_to_hbm", "128", "p2_p1", True)
    assert copy.args == ("%s3_s3", "%s4_s4") and empty == []


def test_a_program_that_libtpu_wrote():
    """For tpu7x: a grid of 16 steps over blocks of 8x128, in each a loop up to a prefetched number. By its listing 18
    bundles come before the grid's loop and 2 after; of the 18 passes of the pipeline 16 have work, 67 bundles without
    the inner loop, and two have none, 32 bundles; a pass of the inner loop is 10 bundles."""
    files = dump.dumped(pathlib.Path(__file__).parent / "recorded", LABELS)
    program = report.Program("loop.1", files["loop.1"])
    trips = [3, 0, 1, 7, 0, 0, 2, 9, 1, 1, 1, 0, 4, 5, 0, 6]
    none, some = (program.count(6, arrays={0: given}) for given in ([0] * 16, trips))
    assert none.cycles == 18 + 16 * 67 + 2 * 32 + 2 and not none.unsettled
    assert some.cycles == none.cycles + 10 * sum(trips)
    assert (some.hbm_read, some.hbm_written, some.transfers) == (0, 16 * 8 * 128 * 4, 16)
    assert program.vmem_bytes == 2 * 8 * 128 * 4  # two output blocks; the input stays where XLA put it
    unknown = program.count(6)
    assert [(branch.index, branch.is_loop) for branch in unknown.unsettled] == [(1, False), (2, True)]


def test_identical_hlo_is_one_program_and_copies_on_sparse_cores_have_bytes():
    hlo = dump.Hlo(
        """
%body.1 (p.1: f32[8,128]) -> f32[8,128] {
  ROOT %add.1 = f32[8,128]{1,0} add(%p.1, %p.1), metadata={op_name="a{b}c"}
}
%body.2 (p.2: f32[8,128]) -> f32[8,128] {
  ROOT %add.2 = f32[8,128]{1,0} add(%p.2, %p.2), metadata={op_name="other"}
}
%body.3 (p.3: f32[8,128]) -> f32[8,128] {
  ROOT %multiply.3 = f32[8,128]{1,0} multiply(%p.3, %p.3)
}
ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %fusion.1 = f32[8,128]{1,0} fusion(%x), kind=kLoop, calls=%body.1
  %fusion.2 = f32[8,128]{1,0} fusion(%fusion.1), kind=kLoop, calls=%body.2
  %fusion.3 = f32[8,128]{1,0} fusion(%fusion.2), kind=kLoop, calls=%body.3
  %c = ((bf16[8,128]{1,0}), bf16[8,128]{0,1}, u32[]{:S(8)}) call-start(%y), async_execution_thread="sparsecore"
  ROOT %k.1 = f32[8,128]{1,0} custom-call(%fusion.3), custom_call_target="tpu_custom_call"
}
"""
    )
    assert hlo.signature("fusion.1") == hlo.signature("fusion.2") != hlo.signature("fusion.3")
    assert hlo.kinds["fusion.1"] == "fusion" and hlo.kinds["k.1"] == "pallas"
    assert hlo.sparse_core_bytes == [2 * 2 * 8 * 128]


def test_memory_at_one_address_counts_once():
    at = lambda offset, size: dump.Allocation("vmem", offset, size, "")  # noqa: E731
    assert dump.covered_bytes([at(0, 10), at(5, 10), at(20, 4), at(21, 2), at(None, 3)]) == 15 + 4 + 3


def test_functions_and_choices_are_parsed_or_refused():
    assert parse_function("a/b.py:f") == ("a/b.py:f", {})
    assert parse_function("b.py:f(chunk=64, config={'owners': 2})") == (
        "b.py:f",
        {"chunk": 64, "config": {"owners": 2}},
    )
    for wrong in ("b.py", "b.py:f(3)", "b.py:f(x=", "b.py:f(x=y)"):
        with pytest.raises(Exception, match=r"is not file\.py:function"):
            parse_function(wrong)
    assert report.Settling.parse("gated_*:3=run") == report.Settling("gated_*", "3", "run")
    assert report.Settling.parse("k.1:*=12").choice == 12
    for wrong in ("k=run", "k:1=jump", "k:x=run", "k:1=0"):
        with pytest.raises(ValueError, match="settles nothing"):
            report.Settling.parse(wrong)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_of_the_table_names_functions_that_take_what_it_says(row):
    function, keywords = parse_function(f"{ROOT}/benchmarks/tpu/ours.py:{row.ours}")
    call, arguments, facts = load(function)(**keywords, time=16, backward=True, chunked=True)
    out, gradients = jax.eval_shape(call, *arguments)
    assert facts["tokens"] == 16 and facts["heads"] * 128 == out.shape[2] * out.shape[3]
    assert [x.shape for x in gradients] == [x.shape for x in arguments[1:]]
    for peers, options in ((row.peers, {"time": 16, "backward": True}), (row.layers, {"time": 16})):
        for peer in peers.values():
            function, keywords = parse_function(f"{ROOT}/benchmarks/tpu/peers.py:{peer}")
            inspect.signature(load(function)).bind(**keywords, **options)


KERNELS = '''
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def chain(steps):
    """Products of which each needs the one before."""

    def body(x_ref, w_ref, out_ref):
        x = x_ref[...]
        for _ in range(steps):
            x = jnp.dot(x.astype(jnp.bfloat16), w_ref[...].astype(jnp.bfloat16), preferred_element_type=jnp.float32)
        out_ref[...] = x

    shape = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    return pl.pallas_call(body, out_shape=shape, name="chain"), [shape, shape]


def doubling(rows, counts=None):
    """A grid over blocks of 8 rows, each doubled as often as an integer says: constants, or an argument."""

    def body(counts_ref, x_ref, out_ref):
        out_ref[...] = jax.lax.fori_loop(0, counts_ref[pl.program_id(0)], lambda _, x: x + x, x_ref[...])

    spec = pl.BlockSpec((8, 128), lambda i, counts_ref: (i, 0))
    grid = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(rows // 8,), in_specs=[spec], out_specs=spec)
    shape = jax.ShapeDtypeStruct((rows, 128), jnp.float32)
    call = pl.pallas_call(body, out_shape=shape, grid_spec=grid, name="doubling")
    if counts is None:
        return call, [jax.ShapeDtypeStruct((rows // 8,), jnp.int32), shape]
    return (lambda x: call(jnp.array(counts) - 1, x)), [shape], {"tokens": rows, "heads": 2}


def glue(steps):
    """A loop of XLA's, whose every pass writes another row."""

    def run(x):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ x), x[0]), x, length=steps)

    return run, [jax.ShapeDtypeStruct((128, 128), jnp.float32)]
'''


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    path = tmp_path_factory.mktemp("kernels") / "kernels.py"
    path.write_text(KERNELS)
    return str(path)


@needs_libtpu
@pytest.mark.parametrize("chip, latency", [("tpu7x", 218), ("v6e", 202)])
def test_a_dependent_product_costs_its_latency(kernels, chip, latency):
    short, long = (report.schedule(f"{kernels}:chain", chip, keywords={"steps": steps})["pallas"] for steps in (4, 8))
    assert long["cycles"] - short["cycles"] == 4 * latency
    assert long["busy"]["MATMUL"] == 2 * short["busy"]["MATMUL"] == 8 * (128 // 16) * 4


@needs_libtpu
def test_loops_over_constant_operands_execute_and_others_must_be_settled(kernels):
    counts = [4, 1, 3, 9] * 8
    figures = {}
    for extra in (0, 2):
        keywords = {"rows": 256, "counts": [n + extra for n in counts]}
        figures[extra] = report.schedule(f"{kernels}:doubling", "tpu7x", keywords=keywords)
    passes = {extra: sum(max(n + extra - 1, 0) for n in counts) for extra in figures}
    [program] = [one for one in figures[0]["programs"] if one["kind"] == "pallas"]
    assert program["program"].startswith("doubling") and not program["settled"]
    per_pass = (figures[2]["pallas"]["cycles"] - figures[0]["pallas"]["cycles"]) / (passes[2] - passes[0])
    assert per_pass == int(per_pass) and 7 <= per_pass <= 16  # a jump and its delay slots, an addition
    assert figures[0]["pallas"]["cycles_per_token_and_head"] == figures[0]["pallas"]["cycles"] / 512
    assert figures[0]["all"]["hbm_written"] >= 256 * 128 * 4

    with pytest.raises(report.Unsettled, match=r"doubling\.\d+:\d+, a loop back from"):
        report.schedule(f"{kernels}:doubling", "tpu7x", keywords={"rows": 256})
    rules = [report.Settling.parse(text) for text in ("doubling*:*=run", "doubling*:*=5")]
    settled = report.schedule(f"{kernels}:doubling", "tpu7x", keywords={"rows": 256}, settle=rules)
    [program] = [one for one in settled["programs"] if one["kind"] == "pallas"]
    assert any(text.endswith(": 5") for text in program["settled"])


@needs_libtpu
def test_a_loop_of_glue_counts_every_pass(kernels):
    few, many = (report.schedule(f"{kernels}:glue", "v6e", keywords={"steps": steps})["glue"] for steps in (20, 40))
    assert many["cycles"] > 1.8 * few["cycles"] and not many["share"]["MATMUL"] == 0


@needs_libtpu
def test_the_command_prints_a_table_and_writes_json(kernels, tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "tpu_schedule.py"), "--json", str(tmp_path / "figures.json")]
    functions = [f"{kernels}:chain(steps=2)", f"{kernels}:chain(steps=4)"]
    done = subprocess.run([*command, *functions, "--ratio", "1", "--tokens", "128"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "cycles per token and head" in done.stdout and "1.00" in done.stdout
    records = json.loads((tmp_path / "figures.json").read_text())
    assert [record["keywords"] for record in records] == [{"steps": 2}, {"steps": 4}]
    missing = subprocess.run([*command, f"{kernels}:chain"], capture_output=True, text=True)
    assert missing.returncode == 1 and "does not compile" in missing.stderr and "steps" in missing.stderr
