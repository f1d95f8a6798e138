"""The masked language model written a second time, in numpy and float64, loop by loop.

Rotation as in arXiv 2104.09864, RoFormerV2 as in bert4keras, RealFormer as in arXiv 2012.11747,
DeepNorm as in arXiv 2203.00555, ReZero as in arXiv 2003.04887; shares no code with the package.
"""

import math

import numpy as np

_erf = np.vectorize(math.erf)


def logits(weights, config, ids, documents, positions, masked_index, alpha=1.0):
    """(M, V) float64 logits; every document is computed alone, without any mask.

    Args:
        weights: parameter name -> array.
        config: ModelConfig.
        ids: (B, S).
        documents: (B, S) document number of each slot.
        positions: (B, S).
        masked_index: (M,) flat indices.
        alpha: residual scale.
    """
    w = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
    hidden = np.zeros((*ids.shape, config.hidden_size))
    for row in range(ids.shape[0]):
        for number in np.unique(documents[row]):
            here = documents[row] == number
            hidden[row, here] = _document(w, config, ids[row, here], positions[row, here], alpha)
    x = hidden.reshape(-1, config.hidden_size)[masked_index]
    if config.mlm_head == "bert":
        activation = "gelu" if config.activation == "swiglu" else config.activation
        x = _norm(w, "head_norm", config, _activate(_linear(w, "head_dense", x), activation))
    elif "head_dense.weight" in w:
        x = _linear(w, "head_dense", x)
    return x @ w["encoder.token_embedding.weight"].T + w.get("head_bias", 0.0)


def _document(w, config, ids, positions, alpha):
    x = w["encoder.token_embedding.weight"][ids] + w["encoder.segment_embedding.weight"][0]
    if config.positions == "learned":
        x = x + w["encoder.position_embedding.weight"][positions + config.position_offset]
    x = _norm(w, "encoder.embedding_norm", config, x)
    if "encoder.embedding_projection.weight" in w:
        x = _linear(w, "encoder.embedding_projection", x)
    carry = [np.zeros((len(ids), len(ids))) for _ in range(config.num_heads)]
    pre = config.norm_placement == "pre"
    for number in range(config.num_layers):
        layer = f"encoder.layers.{0 if config.share_layers else number}"
        for part in ("attention", "feed_forward"):
            name, norm = f"{layer}.{part}", f"{layer}.{part}_norm"
            y = _norm(w, norm, config, x) if pre else x
            if part == "attention":
                update = _attention(w, name, config, y, positions, carry, number)
            else:
                inner = _activate(_linear(w, f"{name}.inner", y), config.activation)
                update = _linear(w, f"{name}.output", inner)
            update = alpha * update * w.get(f"{name}_residual.gain", 1.0)
            keep = (2 * config.num_layers) ** 0.25 if config.residual == "deepnorm" else 1.0
            x = keep * x + update
            x = x if pre else _norm(w, norm, config, x)
    return _norm(w, "encoder.final_norm", config, x) if pre else x


def _attention(w, name, config, x, positions, carry, number):
    q, k, v = np.split(_linear(w, f"{name}.qkv", x), 3, axis=1)
    heads = []
    for head in range(config.num_heads):
        part = slice(head * config.head_size, (head + 1) * config.head_size)
        head_q, head_k = q[:, part], k[:, part]
        if config.positions == "rotary":
            head_q = _rotate(head_q, positions, config.rotary_base)
            head_k = _rotate(head_k, positions, config.rotary_base)
        head_v = v[:, part]
        if config.rotary_value:
            head_v = _rotate(head_v, positions, config.rotary_base)
        scores = head_q @ head_k.T / np.sqrt(config.head_size)
        if config.score_residual != "none":
            scores = scores + carry[head]
            carry[head] = scores
        if config.score_residual == "mean":
            scores = scores / (number + 1)
        if config.attention_scale == "entropy_invariant":
            # On the sum, as bert4keras does; the model scales each layer's own scores.
            scores = scores * np.log(max(len(x), 16)) / np.log(512)
        share = np.exp(scores - scores.max(axis=1, keepdims=True))
        heads.append(share / share.sum(axis=1, keepdims=True) @ head_v)
    return _linear(w, f"{name}.output", np.concatenate(heads, axis=1))


def _linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def _activate(x, activation):
    if activation == "swiglu":
        gate, value = np.split(x, 2, axis=-1)
        return gate / (1.0 + np.exp(-gate)) * value
    if activation == "relu":
        return np.maximum(x, 0.0)
    if activation == "gelu":
        return x * (1.0 + _erf(x / np.sqrt(2.0))) / 2.0
    return x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3))) / 2.0


def _norm(w, name, config, x):
    if config.norm == "layernorm":
        x = x - x.mean(axis=-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config.norm_eps)
    return x * w.get(f"{name}.weight", 1.0) + w.get(f"{name}.bias", 0.0)


def _rotate(x, positions, base):
    """Neighbouring pairs as complex numbers, turned by position * base^(-2i/d)."""
    size = x.shape[1]
    pairs = x[:, 0::2] + 1j * x[:, 1::2]
    angles = positions[:, None] * base ** (-2.0 * np.arange(size // 2) / size)
    turned = pairs * np.exp(1j * angles)
    out = np.empty_like(x)
    out[:, 0::2], out[:, 1::2] = turned.real, turned.imag
    return out
