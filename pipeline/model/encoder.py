"""The encoder: RoFormerV2, with RealFormer's carried scores as a switch.

Forward pass (bojone/bert4keras `bert4keras/models.py` class RoFormerV2): token and segment
embeddings are added, dropout, norm; in each layer x = Norm(x + alpha * F(x)) for attention and for
the feed-forward; the MLM head is dropout and the tied token embedding, nothing else. No bias
anywhere, and the norm has neither gain nor shift.

Shapes: B batch, S sequence, D hidden size, N heads, H head size, M masked positions, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.config.model import ModelConfig
from pipeline.kernels.attention import attention, score_residual_attention
from pipeline.model.initialise import initialise
from pipeline.model.rotary import rotary_tables, rotate


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps), without gain, in fp32 inside.

    Source: Zhang and Sennrich 2019 (arXiv 1910.07467), equation 4, with gain 1.
    """

    def __init__(self, eps: float) -> None:
        """Keeps eps; there is nothing to learn."""
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalises over the last dimension; keeps shape and dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class SelfAttention(nn.Module):
    """Multi-head attention with rotary positions on queries and keys."""

    def __init__(self, config: ModelConfig) -> None:
        """Makes the projections."""
        super().__init__()
        self.num_heads = config.num_heads
        self.carries_scores = config.score_residual == "sum"
        self.dropout = config.attention_dropout
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.output = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self,
        x_BSD: Tensor,
        tables: tuple[Tensor, Tensor],
        allowed_B1SS: Tensor,
        carry_BNSS: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns (B, S, D) and the scores for the layer above, None if they are not carried."""
        batch, length, width = x_BSD.shape
        qkv = self.qkv(x_BSD).view(batch, length, 3, self.num_heads, width // self.num_heads)
        q_BNSH, k_BNSH, v_BNSH = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q_BNSH, k_BNSH = rotate(q_BNSH, *tables), rotate(k_BNSH, *tables)
        dropout = self.dropout if self.training else 0.0
        if self.carries_scores:
            context, carry_BNSS = score_residual_attention(
                q_BNSH, k_BNSH, v_BNSH, allowed_B1SS, dropout, carry_BNSS
            )
        else:
            context = attention(q_BNSH, k_BNSH, v_BNSH, allowed_B1SS, dropout)
        return self.output(context.transpose(1, 2).reshape(batch, length, width)), carry_BNSS


class FeedForward(nn.Module):
    """W2 relu(W1 x)."""

    def __init__(self, config: ModelConfig) -> None:
        """Makes the two projections."""
        super().__init__()
        self.inner = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.output = nn.Linear(config.ffn_size, config.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Keeps shape and dtype."""
        return self.output(F.relu(self.inner(x_BSD)))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention and feed-forward, each x = Norm(x + alpha * Dropout(F(x))).

    Source of alpha: Su 2020, kexue.fm/archives/8620, and RoFormerV2, kexue.fm/archives/8998. The
    carried scores are not scaled by alpha.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Makes both sub-layers."""
        super().__init__()
        self.attention = SelfAttention(config)
        self.feed_forward = FeedForward(config)
        self.norm = RMSNorm(config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x_BSD: Tensor,
        tables: tuple[Tensor, Tensor],
        allowed_B1SS: Tensor,
        carry_BNSS: Tensor | None,
        alpha: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns (B, S, D) and the scores for the layer above."""
        update, carry_BNSS = self.attention(x_BSD, tables, allowed_B1SS, carry_BNSS)
        x_BSD = self._add(x_BSD, update, alpha)
        return self._add(x_BSD, self.feed_forward(x_BSD), alpha), carry_BNSS

    def _add(self, x_BSD: Tensor, update_BSD: Tensor, alpha: Tensor | None) -> Tensor:
        update_BSD = self.dropout(update_BSD)
        if alpha is not None:
            # A 0-dimensional fp32 tensor does not change the dtype of bf16 activations.
            update_BSD = alpha * update_BSD
        return self.norm(x_BSD + update_BSD)  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """Token ids to hidden states."""

    def __init__(self, config: ModelConfig) -> None:
        """Makes an encoder and initialises it from torch's random state.

        Args:
            config: with `vocab_size` set.
        """
        super().__init__()
        assert config.vocab_size is not None, "the caller sets the vocabulary size"
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.segment_embedding = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = RMSNorm(config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        initialise(self, config)

    def forward(
        self,
        input_ids: Tensor,
        documents: Tensor,
        positions: Tensor,
        *,
        segments: Tensor | None = None,
        alpha: Tensor | None = None,
    ) -> Tensor:
        """Encodes packed sequences.

        Args:
            input_ids: (B, S) int64.
            documents: (B, S) integers; tokens see the tokens with their own number only. Padding
                has a number of its own, and sees itself.
            positions: (B, S) int64 position of each token within its document.
            segments: (B, S) int64 segment ids; all 0 when None.
            alpha: 0-dimensional fp32, scale of the residual branches; 1 when None.

        Returns:
            (B, S, D) in the parameters' dtype.
        """
        segment_embedding = (
            self.segment_embedding.weight[0] if segments is None
            else self.segment_embedding(segments)
        )  # fmt: skip
        x_BSD = self.norm(self.dropout(self.token_embedding(input_ids) + segment_embedding))
        tables = rotary_tables(positions, self.config.head_size, self.config.rotary_base)
        allowed_B1SS = (documents[:, :, None] == documents[:, None, :])[:, None]
        carry_BNSS = None
        for layer in self.layers:
            x_BSD, carry_BNSS = layer(x_BSD, tables, allowed_B1SS, carry_BNSS, alpha)
        return x_BSD  # type: ignore[no-any-return]


class MaskedLanguageModel(nn.Module):
    """Encoder with the bare MLM head: logits are dropout(x) times the token embedding."""

    def __init__(self, config: ModelConfig) -> None:
        """Makes the encoder; the head has no parameters of its own."""
        super().__init__()
        self.encoder = Encoder(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        input_ids: Tensor,
        documents: Tensor,
        positions: Tensor,
        masked_index: Tensor,
        alpha: Tensor | None = None,
    ) -> Tensor:
        """Logits of chosen positions only; no (B, S, V) tensor is made.

        Args:
            input_ids: as in `Encoder.forward`.
            documents: as in `Encoder.forward`.
            positions: as in `Encoder.forward`.
            masked_index: (M,) int64, flat indices b * S + s.
            alpha: as in `Encoder.forward`.

        Returns:
            (M, V) in the parameters' dtype.
        """
        x_BSD = self.encoder(input_ids, documents, positions, alpha=alpha)
        x_MD = self.dropout(x_BSD.flatten(0, 1)[masked_index])
        return F.linear(x_MD, self.encoder.token_embedding.weight)
