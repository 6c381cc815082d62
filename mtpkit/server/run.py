"""Starts a server, and ends it: in order when it is asked to, or with an error when its engine
dies."""

import asyncio
import signal
import socket
import sys
import threading

import uvicorn

from mtpkit.engine import AsyncLLM, LLMOptions
from mtpkit.engine.ranks import reports, run_on_first_rank
from mtpkit.errors import UserError
from mtpkit.files import read_text
from mtpkit.server.answers.reader import AnswerStyle
from mtpkit.server.app import make_app
from mtpkit.server.service import Service
from mtpkit.server.settings import ServerOptions

_MOMENT = 3.0
"""Seconds for which a server whose engine has died still answers, so that clients hear of it."""


def serve(engine: LLMOptions, server: ServerOptions) -> None:
    """Serve a model until SIGTERM or SIGINT. Where ranks split the model, all of them call this,
    and rank 0 serves.

    Raises:
        UserError: an address that cannot be listened on, or options that `AsyncLLM` refuses.
        MtpkitError: the engine died.
    """
    template = None
    if server.chat_template is not None:
        template = read_text(server.chat_template)
    first = reports(engine.tensor_parallel_size, engine.pipeline_parallel_size)
    listeners: list[socket.socket] = []
    # An address that is taken ends all ranks, before the model is loaded.
    run_on_first_rank(
        engine.tensor_parallel_size * engine.pipeline_parallel_size,
        lambda: listeners.append(bound(server.host, server.port)),
    )
    if not first:
        _decode_along(engine)
        return

    with listeners[0] as listener:
        llm = AsyncLLM.with_replicas(engine, server.data_parallel_size)
        most = None
        if server.max_queue is not None:
            most = engine.max_num_seqs * server.data_parallel_size + server.max_queue
        serve_llm(llm, str(engine.model), server, listener, most, template)


def serve_llm(
    llm: AsyncLLM,
    root: str,
    server: ServerOptions,
    listener: socket.socket,
    max_open: int | None = None,
    template: str | None = None,
) -> None:
    """Serve with an engine that is ready, and shut it down at the end.

    Args:
        root: the model as the user gave it.
        listener: a bound socket.
        max_open: most unfinished prompts; None: no limit.
        template: chat template to be used instead of the tokenizer's.

    Raises:
        MtpkitError: the engine died.
    """
    try:
        name = server.served_model_name or root
        shown = template or str(getattr(llm.tokenizer, "chat_template", None))
        style = AnswerStyle(shown, server.tool_call_parser, server.reasoning_parser)
        service = Service(llm, name, root, style, max_open, template)
        if llm.memory_plan.total:
            print(llm.memory_plan, file=sys.stderr)
        _run(service, server, listener)
    finally:
        llm.shutdown()
    if llm.failed:
        raise llm.dead_error


def _decode_along(engine: LLMOptions) -> None:
    """Be a rank other than 0, which ends when rank 0 does."""
    llm = AsyncLLM(**vars(engine))
    # Signals to all ranks of a machine are for rank 0, which ends the others.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    llm.wait()
    if llm.failed:
        raise llm.dead_error


def bound(host: str, port: int) -> socket.socket:
    """A socket for an address, on which nobody listens yet: who connects while the model is loaded
    is refused."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"host {host}, port {port} cannot be listened on: {error}; choose others with --host"
            " and --port"
        ) from error
    return listener


def _run(service: Service, server: ServerOptions, listener: socket.socket) -> None:
    """Serve until a signal, or until a moment after the engine's death."""
    app = make_app(service, server.api_key)
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        # Streams have ended by themselves then.
        timeout_graceful_shutdown=int(server.shutdown_timeout + 5),
    )
    # uvicorn raises the signals that ended it once more, and others may come while Python ends,
    # when a function would no longer be called.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    serving = _Server(config, service, server.shutdown_timeout).serve([listener])
    asyncio.run(serving, loop_factory=config.get_loop_factory())


class _Server(uvicorn.Server):
    """A server that gives its streams some time to end, and that ends after its engine."""

    def __init__(self, config: uvicorn.Config, service: Service, patience: float) -> None:
        super().__init__(config)
        self._name = service.name
        self._llm = service.llm
        self._patience = patience

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and to watch the engine."""
        await super().startup(sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            place = f"[{host}]" if ":" in host else host
            print(f"serving {self._name} on http://{place}:{port}", file=sys.stderr, flush=True)
        loop = asyncio.get_running_loop()

        def watch() -> None:
            self._llm.wait()
            if self._llm.failed:
                loop.call_soon_threadsafe(loop.call_later, _MOMENT, self._leave)

        threading.Thread(target=watch, name="mtpkit-watch", daemon=True).start()

    def _leave(self) -> None:
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, wait for responses under way, and end those that take too long with an
        error."""
        ending = threading.Thread(target=self._llm.shutdown, daemon=True)
        timer = asyncio.get_running_loop().call_later(self._patience, ending.start)
        await super().shutdown(sockets)
        timer.cancel()
