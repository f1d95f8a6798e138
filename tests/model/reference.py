"""The masked language model written a second time, in numpy and float64, loop by loop.

Rotation as in arXiv 2104.09864, the rest of RoFormerV2 as in bert4keras, RealFormer as in arXiv
2012.11747; shares no code with the package.
"""

import numpy as np


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
    flat = hidden.reshape(-1, config.hidden_size)[masked_index]
    return flat @ w["encoder.token_embedding.weight"].T


def _document(w, config, ids, positions, alpha):
    x = w["encoder.token_embedding.weight"][ids] + w["encoder.segment_embedding.weight"][0]
    x = _norm(x, config.norm_eps)
    carry = [np.zeros((len(ids), len(ids))) for _ in range(config.num_heads)]
    for layer in range(config.num_layers):
        name = f"encoder.layers.{layer}"
        projected = x @ w[f"{name}.attention.qkv.weight"].T
        q, k, v = np.split(projected, 3, axis=1)
        heads = []
        for head in range(config.num_heads):
            part = slice(head * config.head_size, (head + 1) * config.head_size)
            turned_q = _rotate(q[:, part], positions, config.rotary_base)
            turned_k = _rotate(k[:, part], positions, config.rotary_base)
            scores = turned_q @ turned_k.T / np.sqrt(config.head_size)
            if config.score_residual == "sum":
                scores = scores + carry[head]
                carry[head] = scores
            share = np.exp(scores - scores.max(axis=1, keepdims=True))
            heads.append(share / share.sum(axis=1, keepdims=True) @ v[:, part])
        update = np.concatenate(heads, axis=1) @ w[f"{name}.attention.output.weight"].T
        x = _norm(x + alpha * update, config.norm_eps)
        inner = np.maximum(x @ w[f"{name}.feed_forward.inner.weight"].T, 0.0)
        update = inner @ w[f"{name}.feed_forward.output.weight"].T
        x = _norm(x + alpha * update, config.norm_eps)
    return x


def _norm(x, eps):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)


def _rotate(x, positions, base):
    """Neighbouring pairs as complex numbers, turned by position * base^(-2i/d)."""
    size = x.shape[1]
    pairs = x[:, 0::2] + 1j * x[:, 1::2]
    angles = positions[:, None] * base ** (-2.0 * np.arange(size // 2) / size)
    turned = pairs * np.exp(1j * angles)
    out = np.empty_like(x)
    out[:, 0::2], out[:, 1::2] = turned.real, turned.imag
    return out
