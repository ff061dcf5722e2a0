"""The bundled engine as `llama-server` would run it: what the options leave out is llama.cpp's default.

A program for `EngineSettings.command`. It knows the options that the service appends to such a command, those
two by which a bench leaves KV to the server's own cache, and the one that gives it another chat template.
"""

import argparse
import os
import signal
import sys
from importlib import import_module
from pathlib import Path


def main() -> None:
    """Serve until killed; exits 1 with one line when the engine cannot start."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("-m", dest="model", required=True)
    parser.add_argument("--host", required=True)
    for name in ("--port", "-np", "-c", "-b", "-ub", "-t", "--cache-ram"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--kv-unified", action=argparse.BooleanOptionalAction, required=True)
    parser.add_argument("--cache-idle-slots", action=argparse.BooleanOptionalAction, required=True)
    parser.add_argument("--slot-save-path", required=True)
    parser.add_argument("--chat-template-file", type=Path)
    parser.add_argument("--slots", action="store_true")
    parser.add_argument("--metrics", action="store_true")
    given = parser.parse_args()

    # As the service's own engine, on machines where threads share cores with others.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    xllamacpp = import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = given.model
    params.n_parallel = given.np
    params.n_ctx = given.c
    params.n_batch = given.b
    params.n_ubatch = given.ub
    params.kv_unified = given.kv_unified
    params.cache_ram_mib = given.cache_ram
    params.cache_idle_slots = given.cache_idle_slots
    params.endpoint_slots = given.slots
    params.endpoint_metrics = given.metrics
    params.slot_save_path = given.slot_save_path
    if given.chat_template_file is not None:
        params.chat_template = given.chat_template_file.read_text()
    params.hostnames = [given.host]
    params.port = given.port
    params.ui = False
    params.verbosity = 2
    for cpu in (params.cpuparams, params.cpuparams_batch):
        cpu.n_threads = given.t
    try:
        server = xllamacpp.Server(params)
    except Exception as error:
        sys.exit(f"error: {error}")
    while server.listening_address:
        signal.pause()


if __name__ == "__main__":
    main()
