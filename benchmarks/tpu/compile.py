"""Compile one JAX function for a TPU that is not there, and have libtpu dump the machine programs it made.

Run as a process of its own, because libtpu reads its settings when it is loaded:

    python compile.py '{"function": "file.py:name", "keywords": {}, "chip": "tpu7x", "folder": "/tmp/dump", "flags":
    {}}'

The dumps lie in `folder`, and what JAX says of the compiled program in `folder/compiled.json`. Needs jax and libtpu;
nothing else of this project, so that it also runs in the environment of a peer.
"""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import sys

CHIPS = {"tpu7x": "tpu7x:2x2x1", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1", "v5e": "v5e:2x2"}  # name: topology
LABELS = ("packed-bundles-post-ra", "pre-delay_hlo-static-per-bundle-utilization", "post-delay-converter")
LARGEST = 1 << 22  # elements of an array worth computing to learn an operand's values


def libtpu_environment(folder: pathlib.Path) -> dict[str, str]:
    """What has to be in the environment before libtpu is loaded."""
    dump = {
        "xla_jf_dump_to": folder,
        "xla_jf_dump_llo_text": "true",
        "xla_jf_emit_annotations": "true",
        "xla_jf_dump_llo_pass_label_regex": "|".join(LABELS),
    }
    return {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v6e-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "XLA_FLAGS": "",  # libtpu reads them too, and stops at those it does not know
        "LIBTPU_INIT_ARGS": " ".join(f"--{name}={value}" for name, value in dump.items()),
    }


def load(function: str):
    path, name = function.rsplit(":", 1)
    path = pathlib.Path(path).resolve()
    sys.path.insert(0, str(path.parent))  # what lies beside it can be imported
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def known_operands(jaxpr) -> dict[str, dict[int, list[int]]]:
    """The integer operands of each Pallas kernel that do not depend on the function's arguments: by the kernel's name
    and the operand's index, the values in order. What two calls of one name disagree about is left out."""
    import jax
    import numpy as np

    found: dict[str, dict[int, list[int] | None]] = {}

    def walk(jaxpr, constants, arguments, scope):
        values = dict(zip(jaxpr.constvars, constants)) | dict(zip(jaxpr.invars, arguments))  # None: not known

        def read(atom):
            return atom.val if hasattr(atom, "val") else values.get(atom)

        for equation in jaxpr.eqns:
            inputs = [read(atom) for atom in equation.invars]
            outputs = [None] * len(equation.outvars)
            bodies = [value for value in equation.params.values() if hasattr(value, "eqns")]
            body = getattr(bodies[0], "jaxpr", bodies[0]) if len(bodies) == 1 else None
            is_call = body is not None and equation.primitive.name not in ("cond", "scan", "while")
            if equation.primitive.name == "pallas_call":
                note(equation.params["name"] or scope, inputs)
            elif is_call and len(body.invars) == len(inputs):
                name = equation.params.get("name") or scope  # kernels without a name get that of the function around
                outputs = walk(body, getattr(bodies[0], "consts", ()), inputs, name)
            elif all(value is not None for value in inputs):
                sizes = [int(np.prod(out.aval.shape)) for out in equation.outvars if hasattr(out.aval, "shape")]
                if sum(sizes) <= LARGEST:
                    outputs = evaluate(equation, inputs)
            values.update(zip(equation.outvars, outputs))
        return [read(atom) for atom in jaxpr.outvars]

    def evaluate(equation, inputs):
        try:
            out = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(equation.params))
        except Exception:  # what does not run here is not known
            return [None] * len(equation.outvars)
        return out if equation.primitive.multiple_results else [out]

    def note(name, inputs):
        known = found.setdefault(name, {})
        for index, value in enumerate(inputs):
            one_axis = value is not None and max(value.shape, default=1) == value.size
            integers = one_axis and value.dtype.kind in "iub"
            flat = np.asarray(value).astype(np.int64).ravel().tolist() if integers else None
            known[index] = flat if known.get(index, flat) == flat else None

    with jax.default_device(jax.devices("cpu")[0]):
        walk(jaxpr.jaxpr, jaxpr.consts, [None] * len(jaxpr.jaxpr.invars), "tpu_custom_call")
    return {name: {i: values for i, values in known.items() if values is not None} for name, known in found.items()}


def main(function: str, keywords: dict, chip: str, folder: str, flags: dict):
    import jax
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

    device = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip]).devices[0]
    sharding = SingleDeviceSharding(device)
    jax.default_backend = lambda: "tpu"  # libraries ask it which kernel to take

    build = load(function)
    # Lowerings that ask which chip they are for find it in the mesh.
    kind = AbstractDevice(device_kind=device.device_kind, num_cores=1, platform="tpu")
    mesh = AbstractMesh((1,), ("chip",), (AxisType.Auto,), abstract_device=kind)
    with jax.sharding.use_abstract_mesh(mesh):
        call, arguments, *facts = build(**keywords)
        arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), list(arguments))
        traced = (call if hasattr(call, "trace") else jax.jit(call)).trace(*arguments)
        lowered = traced.lower()
    compiled = lowered.compile(compiler_options=flags)
    memory = compiled.memory_analysis()
    record = {
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")},
        "temporary_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "hlo": compiled.as_text(),
        "operands": known_operands(traced.jaxpr),
        "facts": facts[0] if facts else {},
    }
    pathlib.Path(folder, "compiled.json").write_text(json.dumps(record))


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    os.environ.update(libtpu_environment(pathlib.Path(settings["folder"])))
    main(**settings)
