"""The HTTP endpoints: llama.cpp's own, the OpenAI-compatible ones, and the simulation's controls."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from itertools import count
from typing import Any

import anyio
import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from backends.simulated.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingsBody,
    RerankBody,
    SamplingBody,
    SlotFileBody,
    TemplateBody,
    TokenizeBody,
    parse_body,
)
from backends.simulated.config import SimulatedConfig
from backends.simulated.embedding import EvaluationResponse, embeddings_json, relevance, rerank_json
from backends.simulated.events import ApiError, Failed
from backends.simulated.faults import Fault, FaultBook
from backends.simulated.generation import Generation, GenerationParams
from backends.simulated.loop import StepLoop
from backends.simulated.openai import CREATED, ChatRenderer, TextCompletionRenderer
from backends.simulated.response import GenerationResponse, close_connection
from backends.simulated.sampler import Sampler, ScriptPlayer, TextSampler
from backends.simulated.slot_actions import SlotAction, SlotActionKind
from backends.simulated.template import CHAT_TEMPLATE, apply_template, last_user_text
from backends.simulated.tokenizer import N_VOCAB, decode, encode, valid_tokens
from backends.simulated.wire import CompletionRenderer, Renderer, error_json

_PLAIN_ACTIONS: tuple[SlotActionKind, ...] = ("save", "restore", "erase")
_PARK_ACTIONS: tuple[SlotActionKind, ...] = ("park", "unpark")


class Endpoints:
    """The handlers of one simulated engine."""

    def __init__(self, config: SimulatedConfig, loop: StepLoop, faults: FaultBook) -> None:
        self._config = config
        self._loop = loop
        self._faults = faults
        self._reply_numbers = count(1)

    def routes(self) -> list[Route]:
        """All routes."""
        post = ["POST"]
        return [
            Route("/health", self.health),
            Route("/v1/health", self.health),
            Route("/props", self.props),
            Route("/v1/models", self.models),
            Route("/models", self.models),
            Route("/slots", self.slots),
            Route("/slots/{id_slot}", self.slot_action, methods=post),
            Route("/tokenize", self.tokenize, methods=post),
            Route("/detokenize", self.detokenize, methods=post),
            Route("/apply-template", self.template, methods=post),
            Route("/completion", self.completion, methods=post),
            Route("/completions", self.completion, methods=post),
            Route("/v1/completions", self.text_completion, methods=post),
            Route("/v1/chat/completions", self.chat, methods=post),
            Route("/chat/completions", self.chat, methods=post),
            Route("/v1/embeddings", self.embeddings, methods=post),
            Route("/v1/rerank", self.rerank, methods=post),
            Route("/simulated/stats", self.stats),
            Route("/simulated/faults", self.list_faults, methods=["GET"]),
            Route("/simulated/faults", self.add_faults, methods=post),
            Route("/simulated/faults", self.clear_faults, methods=["DELETE"]),
        ]

    # State

    async def health(self, _: Request) -> Response:
        slow = self._faults.take("slow_health")
        if slow is not None:
            await anyio.sleep(slow.delay_s)
        return _json({"status": "ok"})

    async def props(self, _: Request) -> Response:
        config = self._config
        return _json(
            {
                "default_generation_settings": {
                    "params": {"temperature": 0.8, "n_predict": -1, "seed": 4294967295},
                    "n_ctx": config.slot_n_ctx,
                },
                "total_slots": config.n_slots,
                "model_alias": config.model_alias,
                "model_path": f"/models/{config.model_alias}.gguf",
                "endpoint_slots": True,
                "endpoint_props": True,
                "endpoint_metrics": False,
                "chat_template": CHAT_TEMPLATE,
                "build_info": "b0-simulated",
            }
        )

    async def models(self, _: Request) -> Response:
        model = {
            "id": self._config.model_alias,
            "object": "model",
            "created": CREATED,
            "owned_by": "simulated",
            "meta": {
                "n_vocab": N_VOCAB,
                "n_ctx": self._config.slot_n_ctx,
                "n_ctx_train": 262_144,
                "n_params": 9_000_000_000,
                "size": 5_600_000_000,
            },
        }
        return _json({"object": "list", "data": [model]})

    async def slots(self, _: Request) -> Response:
        return _json([slot.view(self._config) for slot in self._loop.slots])

    # Text

    async def tokenize(self, request: Request) -> Response:
        body = parse_body(TokenizeBody, await request.body())
        return _json({"tokens": encode(body.content, parse_special=body.parse_special)})

    async def detokenize(self, request: Request) -> Response:
        body = parse_body(DetokenizeBody, await request.body())
        if not valid_tokens(body.tokens):
            raise ApiError(400, "Invalid tokens")
        return _json({"content": decode(body.tokens)})

    async def template(self, request: Request) -> Response:
        body = parse_body(TemplateBody, await request.body())
        return _json({"prompt": _render_chat(body)})

    # Slots

    async def slot_action(self, request: Request) -> Response:
        name, id_text = request.query_params.get("action", ""), request.path_params["id_slot"]
        if not id_text.isdecimal() or int(id_text) >= self._config.n_slots:
            raise ApiError(400, "Invalid slot ID")
        known = _PLAIN_ACTIONS + (_PARK_ACTIONS if self._config.native_park else ())
        kind = next((action for action in known if action == name), None)
        if kind is None:
            raise ApiError(400, "Invalid action")
        filename = ""
        if kind in ("save", "restore"):
            filename = parse_body(SlotFileBody, await request.body()).filename
        return _json(await self._loop.act(SlotAction(kind, int(id_text), filename)))

    # Generation

    async def completion(self, request: Request) -> ASGIApp:
        body = parse_body(CompletionBody, await request.body())
        prompt = _prompt_tokens(body)
        renderer = CompletionRenderer(self._config.model_alias, len(prompt), return_tokens=body.return_tokens)
        return self._generate(body, prompt, renderer)

    async def text_completion(self, request: Request) -> ASGIApp:
        body = parse_body(CompletionBody, await request.body())
        renderer = TextCompletionRenderer(self._config.model_alias, self._reply_id("cmpl"))
        return self._generate(body, _prompt_tokens(body), renderer)

    async def chat(self, request: Request) -> ASGIApp:
        body = parse_body(ChatBody, await request.body())
        prompt = encode(_render_chat(body))
        continued = body.messages[-1] if body.continue_final_message else {}
        user_text = last_user_text(body.messages)
        script = next((s for s in self._config.scripts if s.match in user_text), None)
        renderer = ChatRenderer(
            self._config.model_alias,
            self._reply_id("chatcmpl"),
            include_usage=body.include_usage,
            continued=continued if body.echo else None,
            verbose=body.verbose,
        )
        player = None if script is None else ScriptPlayer(script, continued)
        return self._generate(body, prompt, renderer, player)

    async def embeddings(self, request: Request) -> ASGIApp:
        self._check_embeds("embeddings")
        body = parse_body(EmbeddingsBody, await request.body())
        prompts = [encode(text) if isinstance(text, str) else text for text in body.inputs]
        if not all(prompts):
            raise ApiError(400, "Input content cannot be empty")
        as_base64 = body.encoding_format == "base64"
        alias = self._config.model_alias
        return EvaluationResponse(
            self._loop,
            prompts,
            lambda crowded: embeddings_json(alias, prompts, crowded, as_base64=as_base64),
        )

    async def rerank(self, request: Request) -> ASGIApp:
        self._check_embeds("reranking")
        body = parse_body(RerankBody, await request.body())
        prompts = [encode(f"{body.query}\n{document}") for document in body.documents]
        scores = [relevance(body.query, document) for document in body.documents]
        alias = self._config.model_alias
        return EvaluationResponse(
            self._loop, prompts, lambda _: rerank_json(alias, prompts, scores, body.top_n)
        )

    def _check_embeds(self, what: str) -> None:
        if not self._config.embeddings:
            message = f"This server does not support {what}. Start it with `--{what}`"
            raise ApiError(501, message, "not_supported_error")

    def _generate(
        self, body: SamplingBody, prompt: list[int], renderer: Renderer, sampler: Sampler | None = None
    ) -> ASGIApp:
        if body.id_slot >= self._config.n_slots:
            raise ApiError(400, f"Field 'id_slot': there are {self._config.n_slots} slots")
        fault = self._faults.for_request(lambda: decode(prompt))
        params = GenerationParams(
            prompt=tuple(prompt),
            n_predict=body.token_limit,
            id_slot=body.id_slot,
            cache_prompt=body.cache_prompt,
            stop=body.stops,
            return_progress=body.return_progress,
            timings_per_token=body.timings_per_token,
            hang_after_tokens=fault.after_tokens if fault is not None and fault.kind == "hang" else None,
            ignore_disconnect=fault is not None and fault.kind == "ignore_disconnect",
        )
        if sampler is None:
            sampler = TextSampler(
                prompt,
                eos_probability=self._config.eos_probability,
                multibyte_rate=self._config.multibyte_rate,
                ignore_eos=body.ignore_eos,
                seed=body.sampling_seed,
            )
        return GenerationResponse(
            self._loop,
            Generation(params, sampler),
            renderer,
            stream=body.stream,
            fault=fault,
            keepalive_s=self._config.park_keepalive_s,
        )

    def _reply_id(self, prefix: str) -> str:
        return f"{prefix}-{next(self._reply_numbers):08d}"

    # Controls of the simulation

    async def stats(self, _: Request) -> Response:
        return _json(asdict(self._loop.stats()))

    async def list_faults(self, _: Request) -> Response:
        return _json({"faults": self._faults.snapshot()})

    async def add_faults(self, request: Request) -> Response:
        self._faults.add(parse_faults(await request.body()))
        return await self.list_faults(request)

    async def clear_faults(self, request: Request) -> Response:
        self._faults.clear()
        return await self.list_faults(request)


def parse_faults(raw: bytes | str) -> list[Fault]:
    """Faults from JSON: one object or an array of them. Raises ApiError 400."""
    try:
        given = orjson.loads(raw)
        return [Fault(**fault) for fault in (given if isinstance(given, list) else [given])]
    except (ValueError, TypeError) as error:
        raise ApiError(400, f"Invalid fault: {error}") from error


def build_app(
    config: SimulatedConfig,
    loop: StepLoop,
    faults: FaultBook,
    running: Callable[[], AbstractAsyncContextManager[None]],
) -> ASGIApp:
    """The ASGI application. `running` is entered for as long as its server lives, if that server speaks the
    lifespan protocol."""
    app = Starlette(
        routes=Endpoints(config, loop, faults).routes(),
        exception_handlers={ApiError: _on_api_error, HTTPException: _on_http_error},
        lifespan=lambda _: running(),
    )

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        is_control = scope["type"] != "http" or scope["path"].startswith("/simulated/")
        if not is_control and faults.take("refuse") is not None:
            await close_connection(scope, receive)
        else:
            await app(scope, receive, send)

    return guarded


def _render_chat(body: ChatBody | TemplateBody) -> str:
    return apply_template(
        body.messages,
        tools=body.tools or (),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )


def _prompt_tokens(body: CompletionBody) -> list[int]:
    if isinstance(body.prompt, str):
        return encode(body.prompt)
    if not valid_tokens(body.prompt):
        raise ApiError(400, "Prompt contains invalid tokens")
    return body.prompt


def _json(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(error_json(error.failed), error.failed.status, media_type="application/json")


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        failed = Failed(404, "not_found_error", "File Not Found")
    else:
        failed = Failed(error.status_code, "invalid_request_error", error.detail)
    return Response(error_json(failed), failed.status, media_type="application/json")
