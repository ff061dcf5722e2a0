"""Request bodies, checked; every error becomes the 400 answer of the llama.cpp server."""

from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from backends.simulated.events import ApiError

ContinuedField = bool | Literal["content", "reasoning_content"]
TokenLimit = Annotated[int, Field(ge=-1, lt=1 << 31)]


class Body(BaseModel):
    """Unknown fields are ignored, wrong types are refused."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class StreamOptions(Body):
    include_usage: bool = False


class SamplingBody(Body):
    """What all generation endpoints have in common."""

    n_predict: TokenLimit | None = None
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    id_slot: Annotated[int, Field(ge=-1)] = -1
    cache_prompt: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_tokens: bool = False
    return_progress: bool = False
    timings_per_token: bool = False
    stop: list[str] | str | None = None
    ignore_eos: bool = False
    temperature: float | None = None
    seed: int | None = None

    @property
    def token_limit(self) -> int:
        """Most tokens to generate, -1 for no limit."""
        given = (self.max_completion_tokens, self.max_tokens, self.n_predict)
        return next((limit for limit in given if limit is not None), -1)

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def sampling_seed(self) -> int | None:
        """The seed of a sampled request; a greedy one, or one without a seed, has None."""
        return self.seed if self.temperature is not None and self.temperature > 0 else None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(SamplingBody):
    prompt: str | list[int]


class ChatBody(SamplingBody):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: ContinuedField = False
    echo: bool = False
    """With a continued message: the deltas begin with the text that was handed in."""
    verbose: bool = False
    """Whether the last chunk tells the stop string that ended the reply."""


class EmbeddingsBody(Body):
    input: str | list[int] | list[str | list[int]]
    encoding_format: Literal["float", "base64"] = "float"

    @property
    def inputs(self) -> list[str | list[int]]:
        """Each a text or token ids."""
        if isinstance(self.input, str):
            return [self.input]
        ids = [one for one in self.input if isinstance(one, int)]
        return [ids] if ids else [one for one in self.input if not isinstance(one, int)]


class RerankBody(Body):
    query: str
    documents: list[str]
    top_n: int | None = None


class TemplateBody(Body):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: ContinuedField = False


class TokenizeBody(Body):
    content: str
    add_special: bool = False
    parse_special: bool = True


class DetokenizeBody(Body):
    tokens: list[int]


class SlotFileBody(Body):
    filename: str


AnyBody = TypeVar("AnyBody", bound=Body)


def parse_body(kind: type[AnyBody], raw: bytes) -> AnyBody:
    """Reads a JSON body. Raises ApiError 400 that names the first wrong field."""
    try:
        return kind.model_validate(orjson.loads(raw))
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"parse error: {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        name = first["loc"][0] if first["loc"] else "body"
        raise ApiError(400, f"Field '{name}': {first['msg']}") from error
