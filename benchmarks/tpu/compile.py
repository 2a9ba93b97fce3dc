"""Compile one JAX function for a TPU that is not there, and have libtpu dump the machine programs it made.

Run as a process of its own, because libtpu reads its settings when it is loaded:

    python compile.py '{"function": "file.py:name", "keywords": {}, "chip": "tpu7x", "folder": "/tmp/dump"}'

The dumps lie in `folder`, the HLO with them, and what JAX says of the compiled program in `folder/compiled.json`. Needs
jax and libtpu; nothing else of this project, so that it also runs in the environment of a peer.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import sys

CHIPS = {"tpu7x": "tpu7x:2x2x1", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1", "v5e": "v5e:2x2"}  # name: topology
LABELS = ("packed-bundles-post-ra", "pre-delay_hlo-static-per-bundle-utilization", "post-delay-converter")


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


def main(function: str, keywords: dict, chip: str, folder: str):
    import jax
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

    device = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip]).devices[0]
    sharding = SingleDeviceSharding(device)
    jax.default_backend = lambda: "tpu"  # libraries ask it which kernel to take

    build = load(function)
    with contextlib.ExitStack() as stack:
        # Lowerings that ask which chip they are for find it in the mesh.
        kind = AbstractDevice(device_kind=device.device_kind, num_cores=1, platform="tpu")
        mesh = AbstractMesh((1,), ("chip",), (AxisType.Auto,), abstract_device=kind)
        stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        call, arguments, *facts = build(**keywords)
        arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), list(arguments))
        lowered = jax.jit(call).lower(*arguments)
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    record = {
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")},
        "temporary_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "hlo": compiled.as_text(),
        "facts": facts[0] if facts else {},
    }
    pathlib.Path(folder, "compiled.json").write_text(json.dumps(record))


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    os.environ.update(libtpu_environment(pathlib.Path(settings["folder"])))
    main(**settings)
