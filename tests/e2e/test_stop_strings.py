"""The end at a stop string on the real engine, where the word that it was the end is lost."""

from __future__ import annotations

import pytest

from backends.llamacpp import LlamaCppBackend, LlamaCppOptions
from backends.managed import ManagedEngine
from backends.protocol import EngineUnavailable, Finished, Generation
from tests.backends.llamacpp.harness import Recorder, chat, finish, lose_the_last_word

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

LIMIT = 60
STORY = chat("Tell a story about a fox.")


async def test_a_turn_ends_at_its_stop_string_though_the_last_word_is_lost(engine: ManagedEngine) -> None:
    backend = LlamaCppBackend(engine.url, LlamaCppOptions(batch_tokens=64))
    await backend.describe()
    try:
        told = Recorder()
        assert isinstance(await backend.generation("chat", STORY, LIMIT).run(0, told), Finished)
        middle = len(told.text) // 2
        for at in range(middle, middle + 5):  # within a token and at its beginning
            body = {**STORY, "stop": ["never said", told.text[at : at + 24]]}
            whole = Recorder()
            end = await backend.generation("chat", body, LIMIT).run(0, whole)
            for crash in (False, True):
                generation: Generation = backend.generation("chat", body, LIMIT)
                sink = Recorder(generation)
                lose_the_last_word(generation)
                with pytest.raises(EngineUnavailable):
                    await generation.run(0, sink)
                if crash:
                    so_far = sink.so_far(len(sink.parts), known=True)
                    generation = backend.generation("chat", body, LIMIT, so_far)
                again, _ = await finish(generation, sink)
                assert sink.text == whole.text == told.text[:at]
                assert isinstance(end, Finished)
                assert again.finish_reason == end.finish_reason == "stop"
                assert again.stop_sequence == end.stop_sequence == body["stop"][1]
                assert again.completion_tokens == end.completion_tokens
    finally:
        await backend.aclose()
