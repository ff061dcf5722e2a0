"""The engine process: xllamacpp's llama.cpp server, from the JSON settings in the first argument.

SIGTERM and SIGINT keep their default action and end the process at once, also while a model loads: there is
nothing to save, and the server's destructor, which a Python exit would run, may hang.

What ``context`` becomes in the engine is in ``backends/managed/settings.py``.
"""

import json
import os
import signal
import sys
from importlib import import_module
from typing import NoReturn

# Warnings and errors. One step more logs several lines for every request, without bound.
_VERBOSITY = 2

# How long an OpenMP thread (the Linux wheels use OpenMP) spins at a barrier before it sleeps. libgomp's own
# figure, 300,000, is for a machine to itself: as soon as a third process computes on two cores, a thread
# spins through its time while the one it waits for is not running, at hundreds of barriers in each step.
# Measured with 2 threads on 2 cores and 8 turns: 46 ms a step with either on a quiet machine; beside one
# busy process 444 to 3,900 ms with 300,000, 98 to 100 ms with 1,000.
_SPIN_COUNT = "1000"


def main() -> None:
    """Serve until killed; exits 1 with one line on stderr when the engine cannot start."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    order = json.loads(sys.argv[1])

    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    try:
        xllamacpp = import_module("xllamacpp")
    except ImportError as error:
        # Also where the wheel is installed and the system's libgomp is not.
        _fail(error)
    params = xllamacpp.CommonParams()
    params.model.path = order["model"]
    params.n_parallel = order["engine_slots"]
    params.n_ctx = order["context"]
    params.n_batch = order["batch_tokens"]
    params.n_ubatch = order["batch_tokens"]
    params.kv_unified = order["unified"]
    params.cache_type_k = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{order['cache_type_k'].upper()}")
    params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{order['cache_type_v'].upper()}")
    if order["flash_attention"]:
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    # A paused turn's KV stays where the service put it: the engine neither clears nor moves it.
    params.cache_idle_slots = False
    params.cache_ram_mib = 0
    params.ctx_shift = False
    params.endpoint_slots = True
    params.endpoint_props = True
    params.endpoint_metrics = True
    params.slot_save_path = order["save_path"].rstrip(os.sep) + os.sep
    params.hostnames = ["127.0.0.1"]
    params.port = order["port"]
    params.ui = False
    # Without this any web page in the user's browser may talk to the engine.
    params.cors_origins = "localhost"
    params.verbosity = _VERBOSITY
    for cpu in (params.cpuparams, params.cpuparams_batch):
        cpu.n_threads = order["threads"]
    if order["gpu_layers"] is not None:
        params.n_gpu_layers = order["gpu_layers"]
    try:
        server = xllamacpp.Server(params)
    except Exception as error:
        _fail(error)
    # The server runs in threads of its own; this one only keeps it alive.
    while server.listening_address:
        signal.pause()


def _fail(error: Exception) -> NoReturn:
    sys.stderr.write(f"error: {error}\n")
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main()
