"""A stand-in for `llama-server --embeddings --pooling mean`, with what the tests need of its options.

Any model makes vectors that way, if poor ones.
"""

import argparse
import os
import signal

# Before the import: threads that spin at a barrier stop each other when others compute, too.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import xllamacpp


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("-m", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("-np", type=int, required=True)
    parser.add_argument("-c", type=int, required=True)
    parser.add_argument("-b", type=int, required=True)
    given, _ = parser.parse_known_args()
    params = xllamacpp.CommonParams()
    params.model.path = given.m
    params.n_parallel = given.np
    params.n_ctx = given.c
    params.n_batch = params.n_ubatch = given.b
    params.embedding = True
    params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    params.kv_unified = False
    params.cache_idle_slots = False
    params.cache_ram_mib = 0
    params.endpoint_slots = params.endpoint_props = True
    params.hostnames = ["127.0.0.1"]
    params.port = given.port
    params.verbosity = 2
    for cpu in (params.cpuparams, params.cpuparams_batch):
        cpu.n_threads = 2
    server = xllamacpp.Server(params)
    while server.listening_address:
        signal.pause()


if __name__ == "__main__":
    main()
