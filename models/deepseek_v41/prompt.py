"""Chat requests as token ids, through the model's own encoder, the `deepseek-recipe` package.

Nothing of the prompt format is re-implemented here: roles, thinking marks and reasoning budgets are the package's. This file
turns its faults into typed errors, and lets any model name stand for this model.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tapeout.models.deepseek_v41.errors import ChatError, Problem
from tapeout.models.deepseek_v41.tokenizer import Detokenizer, Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import deepseek_recipe

__all__ = ["ChatPrompt", "Detokenizer", "Tokenizer", "encode_chat", "load_tokenizer", "render_chat"]

MODEL_NAME = "DeepSeek-V4.1-Flash"


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered chat request. `request` is the package's object: inference options, parsing options, limits."""

    text: str
    request: "deepseek_recipe.ConversationRequest"
    is_thinking: bool
    images: int


def render_chat(body: Mapping[str, Any] | str | bytes) -> ChatPrompt:
    """Renders a Chat Completions body: messages, tools, reasoning_effort, response_format and so on.

    `model` may be absent or any name. Raises `ChatError` when the body is not a valid request.
    """
    import deepseek_recipe as recipe

    fields = _fields(body)
    name = fields.setdefault("model", MODEL_NAME)
    try:
        options = recipe.ConversionOptions().with_model_alias(name, recipe.ModelVersion.DeepseekV41Flash)
        request = recipe.ChatCompletionRequest(fields).convert(options)
        rendered = recipe.DeepseekV41Encoding().render_conversation(request.conversation)
    except (recipe.ConversionError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise _refused(str(error)) from error
    thinking = request.conversation.thinking_mode
    return ChatPrompt(rendered.prompt, request, thinking, len(rendered.image_sources))


def encode_chat(prompt: ChatPrompt, tokenizer: Tokenizer) -> list[int]:
    """Returns the ids of a rendered chat. Special tokens spelled inside a message stay plain text.

    Raises `ChatError` when the tokenizer has no id for a mark of the format.
    """
    import deepseek_recipe as recipe

    try:
        encoding = recipe.DeepseekV41Encoding().with_tokenizer(tokenizer.chat_native)
        ids = encoding.encode(prompt.request.conversation)
    except (ValueError, RuntimeError) as error:
        raise _refused(str(error)) from error
    return tokenizer.checked(ids)


def _fields(body: Mapping[str, Any] | str | bytes) -> dict[str, Any]:
    if isinstance(body, Mapping):
        return dict(body)
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError, TypeError) as error:
        raise _refused(f"no JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise _refused(f"JSON of type {type(parsed).__name__}")
    return parsed


def _refused(found: str) -> ChatError:
    fix = "correct the request"
    return ChatError("chat request", [Problem("M306", "body", found, "a Chat Completions request", fix)])
