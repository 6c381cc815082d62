"""What all workloads of `mtpkit bench load` share: the model, the machine, and how an engine is
made."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from mtpkit.bench.experts import ExpertDraws
from mtpkit.bench.load.serving import Clock
from mtpkit.bench.machine import Machine, measure_machine
from mtpkit.bench.settings import LoadConfig, engine_arguments
from mtpkit.engine import LLM
from mtpkit.engine.loading import draft_token_ids
from mtpkit.model.hybrid import HybridModel

Drafts = int | Literal["auto"]


class Workload[Row]:
    """A rule by which requests arrive, and what is measured of them: a row for each case."""

    name: ClassVar[str]
    """Name of the report's files."""
    row: ClassVar[type]
    """Type of the rows."""
    sustained: ClassVar[bool] = False
    """Whether `Machine.sustained_rate` is measured."""
    traced: ClassVar[bool] = False
    """Whether kernels are traced after all timing."""

    def __init__(self, model: HybridModel, config: LoadConfig, rule: Any, clock: Clock) -> None:
        self.model = model
        self.config = config
        self.rule = rule
        self.clock = clock
        weight = next(model.parameters())
        self.device = weight.device
        self.dtype = weight.dtype
        self.draws = ExpertDraws(model, config.random_experts)
        """Drawn experts, for what is timed or traced."""
        self.machine: Machine = measure_machine(weight.device, sustained=self.sustained)

    @property
    def cases(self) -> Sequence[Any]:
        """What rows are measured of; by default each K."""
        return self.config.num_speculative_tokens or ()

    def label(self, case: Any) -> str:
        """A case as the progress bar shows it."""
        return f"K = {case}"

    def title(self, name: str) -> str:
        """The requests in words, and the model's name."""
        raise NotImplementedError

    @property
    def about(self) -> dict[str, object]:
        """What the report's settings have beside those of the command."""
        return {}

    def measure(self, case: Any) -> Row:
        """Serve the requests of a case with a new engine."""
        raise NotImplementedError

    def trace(self, case: Any, row: Row) -> Row:
        """Add to a row what a trace of kernels tells. Nothing can be timed afterwards."""
        raise NotImplementedError


def most_drafts(model: HybridModel, k: Drafts) -> int:
    """The largest K of a step."""
    return model.mtpkit_config.mtp.most_adaptive_drafts if k == "auto" else k


def draft_vocab_size(model: HybridModel, config: LoadConfig) -> int | None:
    """Number of tokens that drafts are chosen from; None: all."""
    ids = draft_token_ids(config.engine.draft_vocab, model.mtpkit_config.vocab_size)
    return None if ids is None else len(ids)


def start_engine(model: HybridModel, config: LoadConfig, k: Drafts, **settings: object) -> LLM:
    """Make an engine that drafts K tokens, which are accepted at the synthetic rates."""
    depths = most_drafts(model, k)
    rates = config.rates(depths) if depths else None
    own = {"synthetic_acceptance": rates} | settings
    return LLM(model, **engine_arguments(config.engine, k, **own))


def shown_rate(rate: float) -> float | Literal["inf"]:
    """A rate as reports show it, infinity as text, since JSON has no infinity."""
    return "inf" if rate == math.inf else rate
