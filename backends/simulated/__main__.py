"""A simulated engine as a process of its own: `python -m backends.simulated --port 8080 --slots 64`.

Prints `listening on http://127.0.0.1:PORT` once it accepts connections, and ends on SIGTERM or SIGINT.
"""

import argparse
import signal
import sys
from dataclasses import replace
from pathlib import Path

import anyio
import orjson

from backends.simulated.app import parse_faults
from backends.simulated.config import ScriptedReply, SimulatedConfig
from backends.simulated.events import ApiError
from backends.simulated.profile import PROFILES
from backends.simulated.server import serve_simulated


def parse_arguments(arguments: list[str] | None = None) -> tuple[SimulatedConfig, int]:
    """Configuration and port from the command line."""
    defaults = SimulatedConfig()
    parser = argparse.ArgumentParser(prog="python -m backends.simulated", description=__doc__)
    add = parser.add_argument
    add("--port", type=int, default=0, help="0 takes a free one")
    add("--slots", type=int, default=defaults.n_slots)
    add("--ctx", type=int, default=defaults.n_ctx, help="KV tokens in all")
    add("--kv-unified", action="store_true", help="one KV pool for all slots")
    add("--profile", choices=sorted(PROFILES), default="instant")
    add("--n-batch", type=int, help="most tokens evaluated in one step")
    add("--time-scale", type=float, default=defaults.time_scale)
    add("--eos-probability", type=float, default=defaults.eos_probability)
    add("--multibyte-rate", type=float, default=defaults.multibyte_rate)
    add("--resume-reprefills", action="store_true", help="reuse KV only by appending to it")
    add("--embeddings", action="store_true", help="offer /v1/embeddings and /v1/rerank")
    add("--native-park", action="store_true", help="offer park and unpark of processing slots")
    add("--slot-save-path", type=Path, help="directory for saved slots")
    add("--kv-bytes-per-token", type=int, default=defaults.kv_bytes_per_token)
    add(
        "--kv-fixed-bytes",
        type=int,
        default=defaults.kv_fixed_bytes,
        help="state of a sequence of any length",
    )
    add("--alias", default=defaults.model_alias, help="name of the model")
    add("--faults", default="[]", help="JSON: a fault or an array of faults")
    add("--scripts", type=Path, help="JSON file: an array of {match, deltas, finish_reason}")
    given = parser.parse_args(arguments)
    try:
        profile = PROFILES[given.profile]
        config = SimulatedConfig(
            n_slots=given.slots,
            n_ctx=given.ctx,
            kv_unified=given.kv_unified,
            profile=profile if given.n_batch is None else replace(profile, n_batch=given.n_batch),
            time_scale=given.time_scale,
            eos_probability=given.eos_probability,
            multibyte_rate=given.multibyte_rate,
            scripts=() if given.scripts is None else _read_scripts(given.scripts),
            resume_reprefills=given.resume_reprefills,
            slot_save_path=given.slot_save_path,
            embeddings=given.embeddings,
            native_park=given.native_park,
            kv_bytes_per_token=given.kv_bytes_per_token,
            kv_fixed_bytes=given.kv_fixed_bytes,
            model_alias=given.alias,
            faults=tuple(parse_faults(given.faults)),
        )
    except (ApiError, ValueError, TypeError, KeyError, OSError) as error:
        parser.error(str(error))
    return config, given.port


def _read_scripts(path: Path) -> tuple[ScriptedReply, ...]:
    return tuple(
        ScriptedReply(script["match"], tuple(script["deltas"]), script.get("finish_reason", "stop"))
        for script in orjson.loads(path.read_bytes())
    )


async def serve(config: SimulatedConfig, port: int) -> None:
    """Serves until a signal to end."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with serve_simulated(config, port=port) as url:
            sys.stdout.write(f"listening on {url}\n")
            sys.stdout.flush()
            async for _ in signals:
                break


if __name__ == "__main__":
    anyio.run(serve, *parse_arguments(), backend_options={"use_uvloop": True})
