"""Options of the server, each declared once: `mtpkit serve` makes its options from them."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from mtpkit.config import LARGEST_COUNT
from mtpkit.config.checked import checked

Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]


@checked("server")
class ServerOptions:
    """Where the server listens, for whom, and how much it takes in."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0: all addresses of this machine."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0: any that is free, which is printed."""
    served_model_name: str | None = None
    """Name of the model in requests and responses; by default MODEL as it is given."""
    api_key: str | None = None
    """Key that clients must send as bearer token; by default that in the environment variable
    MTPKIT_API_KEY, or none."""
    data_parallel_size: Count = 1
    """Processes, each with the whole model and a GPU, that share out the requests."""
    max_queue: Annotated[int, Field(ge=0, le=LARGEST_COUNT)] | None = None
    """Most prompts that wait while `max_num_seqs` per process run; those beyond are answered with
    status 429. By default there is no limit."""
    chat_template: Path | None = None
    """File with a chat template in Jinja, to be used instead of the tokenizer's."""
    tool_call_parser: Literal[
        "auto", "none", "deepseek_v3", "nemotron", "glm45", "qwen3_coder", "hermes"
    ] = "auto"
    """Format in which the model calls tools. "auto": the one that the chat template shows. "none":
    calls remain text."""
    reasoning_parser: Literal["auto", "none", "think"] = "auto"
    """Separate reasoning from answers: "think" between `<think>` and `</think>`. "auto": if the
    chat template has these markers. "none": reasoning remains text."""
    shutdown_timeout: Annotated[float, Field(gt=0)] = 25.0
    """Most seconds that responses under way have to end after SIGTERM."""
