"""What all workloads of `mtpkit bench load` share: the model, the machine, and how an engine is
made."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from mtpkit.bench.load.serving import Clock
from mtpkit.bench.machine import Machine, measure_machine
from mtpkit.bench.settings import LoadConfig, engine_settings
from mtpkit.engine import LLM
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
        self.machine: Machine = measure_machine(weight.device, sustained=self.sustained)

    @property
    def cases(self) -> Sequence[Any]:
        """What rows are measured of; by default each K."""
        return self.config.ks or ()

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


def start_engine(model: HybridModel, config: LoadConfig, k: Drafts, **settings: object) -> LLM:
    """Make an engine that drafts K tokens, which are accepted at the synthetic rates."""
    depths = most_drafts(model, k)
    rates = config.rates(depths) if depths else None
    given = {"num_speculative_tokens": k, "synthetic_acceptance": rates} | settings
    return LLM(model, **engine_settings(config, **given))


def shown_rate(rate: float) -> float | Literal["inf"]:
    """A rate as reports show it, infinity as text, since JSON has no infinity."""
    return "inf" if rate == math.inf else rate
