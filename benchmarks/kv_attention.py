"""How far the output of attention moves when keys and values went through a codec, for queries that a model asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.kv_chunks import Chunk
from kvstore.pages import PageLayout


class Queries:
    """The rotated queries of a transformers model with the same weights: our own forward pass shows none."""

    def __init__(self, folder: Path) -> None:
        """folder: config.json and weights."""
        import transformers

        transformers.utils.logging.disable_progress_bar()
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.eval()

    def of(self, chunk: Chunk, num_tokens: int) -> npt.NDArray[np.float32]:
        """float32 [layers, query heads, num_tokens, head_dim]: of the first tokens after the prefix."""
        found: list[torch.Tensor] = []

        def keep(module: Any, _: Any, options: dict[str, Any]) -> None:
            from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

            hidden = options["hidden_states"][:, -num_tokens:]
            cosines, sines = (part[:, -num_tokens:] for part in options["position_embeddings"])
            query = module.q_proj(hidden).unflatten(-1, (-1, module.head_dim))
            if hasattr(module, "q_norm"):
                query = module.q_norm(query)
            query = query.transpose(1, 2)
            found.append(apply_rotary_pos_emb(query, query, cosines, sines)[0][0])

        layers = self._model.model.layers
        hooks = [layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
        try:
            with torch.no_grad():
                self._model.model(torch.tensor([[*chunk.prefix, *chunk.rest[:num_tokens]]]))
        finally:
            for hook in hooks:
                hook.remove()
        return torch.stack(found).numpy()


def attention(
    queries: npt.NDArray[np.float32], pages: npt.NDArray[np.uint8], layout: PageLayout
) -> npt.NDArray[np.float32]:
    """Attention over the positions of `pages` alone: float32, the shape of `queries`.

    queries: [layers, query heads, tokens, head_dim]. pages: uint8 [n, page_bytes].
    """
    values = torch.from_numpy(pages).view(getattr(torch, layout.dtype)).view(len(pages), *layout.shape).float()
    by_layer = values.permute(3, 2, 1, 0, 4, 5).flatten(3, 4)  # k|v, layer, kv head, position, head_dim
    keys_and_values = by_layer.repeat_interleave(queries.shape[1] // layout.num_kv_heads, dim=2)
    scores = torch.from_numpy(queries) @ keys_and_values[0].transpose(-1, -2) / layout.head_dim**0.5
    return (scores.softmax(-1) @ keys_and_values[1]).numpy()


def relative_error(expected: npt.NDArray[np.float32], got: npt.NDArray[np.float32]) -> float:
    """Norm of the difference by norm, mean over layers."""
    axes = (1, 2, 3)
    errors = np.sqrt(((got - expected) ** 2).sum(axes) / (expected**2).sum(axes))
    return float(errors.mean())
