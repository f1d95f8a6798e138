"""Writes the checkpoints of this folder; they were made with TensorFlow 2.21.0 (tensorflow-cpu).

    python3.11 -m venv /tmp/tfenv && /tmp/tfenv/bin/pip install tensorflow-cpu==2.21.0
    /tmp/tfenv/bin/python tests/use/tf_fixture/make.py

mixed         every dtype, scalar and empty shapes, shared prefixes, two shards, one refused dtype
sliced        a partitioned variable
v1            the format before tensor bundles
bert, roformer, roformer_v2    tiny models with the variable names of the published checkpoints

Each folder's `expected.npz` holds what was written, bfloat16 as float32.
"""

from pathlib import Path

import numpy as np
import tensorflow as tf

HERE = Path(__file__).parent
v1 = tf.compat.v1
BFLOAT16 = tf.bfloat16.as_numpy_dtype
PARTITIONED = "partitioned"
HIDDEN, FFN, VOCAB, POSITIONS, TYPES, LAYERS = 8, 12, 20, 10, 2, 2


def save(folder: str, prefix: str, tensors: dict[str, np.ndarray], **options: object) -> None:
    """Saves every tensor as a variable, in turn on one of two devices where `sharded`."""
    path = HERE / folder
    path.mkdir(exist_ok=True)
    for old in path.iterdir():
        old.unlink()
    devices = 2 if options.get("sharded") else 1
    with tf.Graph().as_default():
        for number, (name, value) in enumerate(tensors.items()):
            with tf.device(f"/cpu:{number % devices}"):
                if name == PARTITIONED:
                    parts = v1.fixed_size_partitioner(2)
                    v1.get_variable(
                        name, value.shape, initializer=v1.ones_initializer, partitioner=parts
                    )
                else:
                    v1.get_variable(name, initializer=tf.constant(value), use_resource=False)
        saver = v1.train.Saver(v1.global_variables(), **options)
        config = v1.ConfigProto(device_count={"CPU": devices})
        with v1.Session(config=config) as session:
            session.run(v1.global_variables_initializer())
            saver.save(session, str(path / prefix), write_meta_graph=False, write_state=False)
    known = {n: t.astype(np.float32) if t.dtype == BFLOAT16 else t for n, t in tensors.items()}
    known = {n: t for n, t in known.items() if t.dtype != object}
    np.savez_compressed(path / "expected.npz", **known)


def mixed(rng: np.random.Generator) -> dict[str, np.ndarray]:
    special = np.array([np.nan, -np.inf, np.inf, -0.0, 1e-40, 3.4e38], np.float32)
    tensors = {"float32/special": special,
               "float32/matrix": rng.standard_normal((5, 7)).astype(np.float32),
               "float64/cube": rng.standard_normal((2, 3, 4)),
               "float16/matrix": rng.standard_normal((3, 3)).astype(np.float16),
               "bfloat16/matrix": rng.standard_normal((4, 3)).astype(BFLOAT16),
               "bfloat16/special": special.astype(BFLOAT16),
               "int32/vector": np.array([0, 1, -1, 2**31 - 1, -(2**31)], np.int32),
               "int64/scalar": np.array(-(2**63), np.int64),
               "int64/vector": rng.integers(-(2**62), 2**62, 9),
               "bool/vector": np.array([True, False, False, True]), "bool/scalar": np.array(True),
               "float32/scalar": np.array(0.1, np.float32),
               "float32/empty": np.zeros((3, 0, 2), np.float32),
               "int32/empty": np.zeros((0,), np.int32),
               "refused/uint8": np.arange(5, dtype=np.uint8),
               "refused/string": np.array([b"one", b"two"], object)}  # fmt: skip
    prefix = "a_rather_long_scope/shared_by_many_variables/layer"
    for layer in range(20):  # more than the 16 keys between two restart points
        tensors[f"{prefix}_{layer}/kernel"] = rng.standard_normal((2, 3)).astype(np.float32)
        tensors[f"{prefix}_{layer}/kernel_bias"] = rng.standard_normal(3).astype(np.float32)
    return tensors


def model_shapes(kind: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one kind of model; kernels are (in, out)."""
    h, is_v2 = HIDDEN, kind == "roformer_v2"
    shapes: dict[str, tuple[int, ...]] = {}

    def dense(scope: str, inputs: int, outputs: int) -> None:
        shapes[f"{scope}/kernel"] = (inputs, outputs)
        if not is_v2:
            shapes[f"{scope}/bias"] = (outputs,)

    def norm(scope: str) -> None:
        if not is_v2:
            shapes[f"{scope}/LayerNorm/gamma"] = (h,)
            shapes[f"{scope}/LayerNorm/beta"] = (h,)

    shapes["bert/embeddings/word_embeddings"] = (VOCAB, h)
    if kind == "bert":
        shapes["bert/embeddings/position_embeddings"] = (POSITIONS, h)
    shapes["bert/embeddings/token_type_embeddings"] = (TYPES, h)
    norm("bert/embeddings")
    for i in range(LAYERS):
        layer = f"bert/encoder/layer_{i}"
        for part in ("query", "key", "value"):
            dense(f"{layer}/attention/self/{part}", h, h)
        dense(f"{layer}/attention/output/dense", h, h)
        norm(f"{layer}/attention/output")
        dense(f"{layer}/intermediate/dense", h, FFN)
        dense(f"{layer}/output/dense", FFN, h)
        norm(f"{layer}/output")
    if kind == "bert":
        dense("bert/pooler/dense", h, h)
        shapes["cls/seq_relationship/output_weights"] = (2, h)
        shapes["cls/seq_relationship/output_bias"] = (2,)
    if not is_v2:
        dense("cls/predictions/transform/dense", h, h)
        norm("cls/predictions/transform")
        shapes["cls/predictions/output_bias"] = (VOCAB,)
    return shapes


def model(kind: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = model_shapes(kind)
    if kind == "bert":
        for name in list(shapes)[:6]:
            shapes |= {f"{name}/adam_m": shapes[name], f"{name}/adam_v": shapes[name]}
    tensors = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    if kind == "bert":
        tensors["global_step"] = np.array(1_000_000, np.int64)
    return tensors


def main() -> None:
    save("mixed", "mixed.ckpt-12", mixed(np.random.default_rng(0)), sharded=True)
    step = np.array(3, np.int64)
    save("sliced", "model.ckpt", {PARTITIONED: np.ones((6, 2), np.float32), "step": step})
    save("v1", "model.ckpt", {"step": step}, write_version=v1.train.SaverDef.V1)
    for seed, kind in enumerate(("bert", "roformer", "roformer_v2"), start=1):
        save(kind, "model.ckpt", model(kind, np.random.default_rng(seed)))


if __name__ == "__main__":
    main()
