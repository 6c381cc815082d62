"""A server whose engine computes nothing: `python -m benchmarks.server.serve_stub TOKENIZER`."""

import argparse
from pathlib import Path

from benchmarks.server.stub import StubProcess
from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.engine import AsyncLLM
from mtpkit.server.run import bound, serve_llm
from mtpkit.server.settings import ServerOptions


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server.serve_stub")
    parser.add_argument("tokenizer", type=Path, help="directory of the tokenizer")
    parser.add_argument("--pace", type=float, required=True, help="seconds of a step")
    parser.add_argument("--tokens-per-step", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, required=True)
    options = parser.parse_args()
    engine = StubProcess(
        options.tokenizer, options.pace, options.tokens_per_step, options.max_num_seqs
    )
    llm = AsyncLLM.of_engines(engine, load_tokenizer(options.tokenizer))
    with bound("127.0.0.1", 0) as listener:
        serve_llm(llm, "stub", ServerOptions(), listener)


if __name__ == "__main__":
    main()
