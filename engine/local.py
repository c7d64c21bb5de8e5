"""The whole engine in one process: what split serving must equal, token for token."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core import EngineConfig, EngineCore
from engine.model import Model
from engine.namespace import namespace_of
from engine.sampling import SamplingParams
from kvstore.pages import PageCache, allocate_region


class LocalEngine:
    """A model with a pool of its own. Batches what it is given; keeps prefixes between calls."""

    def __init__(self, model: Model, *, page_size: int, num_pages: int, config: EngineConfig | None = None) -> None:
        layout = model.layout(page_size)
        cache = PageCache(layout, allocate_region(num_pages * layout.page_bytes), num_pages)
        model.bind(cache.pages, layout)
        self.core = EngineCore(model, cache, config or EngineConfig())
        self._namespace = namespace_of(model, page_size)

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
        """Output token ids per prompt, the token that says STOP left out.

        All prompts run at once: raises NoRoom where the pool cannot hold them with their growth.
        """
        growth = params.max_tokens or self.core.context_tokens
        sequences = [
            self.core.open(
                f"local-{place}", prompt, len(prompt), params, namespace=self._namespace, growth_tokens=growth
            )
            for place, prompt in enumerate(prompts)
        ]
        for sequence in sequences:
            self.core.compute(sequence)
        while self.core.has_work:
            for output in self.core.step().outputs:
                if output.error is not None:
                    raise ArithmeticError(output.error)
                if output.finish is not None:
                    self.core.close(output.sequence)
        return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]
