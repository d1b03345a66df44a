"""New weights into a running engine, and the proof that they arrived.

A push is: write or broadcast -> engine pauses, loads, relabels, resumes -> compare version, checksums and log-probs.
Nothing here sees the engine itself: a ``call(method, *args, timeout=...)`` reaches it, in another process or not, and
only names, places and numbers cross.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchrl_copc.collectors.checksum import tensor_checksum
from torchrl_copc.collectors.engine import ParameterChecksum, VLLMEngineConfig
from torchrl_copc.collectors.transfer import EngineCall, call_timeout, make_transport

_Part = tuple[str, int, int, int]  # name, dim, start, stop
ScoreFn = Callable[[Sequence[Sequence[int]]], Sequence[Sequence[float]]]

_NAMED = 8
# Allowed noise never falls below these (mean, max; nats): a calibration on a lucky batch must not stop a healthy run.
_LEAST_NOISE = {"float32": (1e-5, 1e-3), "bfloat16": (0.02, 0.5), "float16": (0.005, 0.1)}
# A calibration that measures more than this (mean, nats) has compared two different models.
_MOST_NOISE = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.05}


class WeightSyncError(RuntimeError):
    """The engine does not compute with the weights that were pushed; training on its rollouts would be wrong."""


@dataclass(frozen=True)
class PushReport:
    """One push, verified.

    Args:
        version: label of the weights now in use.
        seconds: duration of each step.
        noise_mean: mean absolute difference of engine and learner log-probs on the probe, nats.
        noise_max: the largest one.
        num_bytes: size of the weights in the engine's dtype.
    """

    version: int
    seconds: dict[str, float] = field(default_factory=dict)
    noise_mean: float = 0.0
    noise_max: float = 0.0
    num_bytes: int = 0


class WeightPublisher:
    """Pushes the learner's weights into the engine and verifies each push (rank 0 only).

    Args:
        call: reaches the engine, for example ``RolloutWorker.call``.
        config: the engine's settings.
        probe: token sequences (two ids or more each) whose log-probs are compared after each push; text like the
            task's own measures the noise that the ratios will see.
        safety: allowed noise as a multiple of the calibrated noise.
    """

    def __init__(
        self,
        call: EngineCall,
        config: VLLMEngineConfig,
        probe: Sequence[Sequence[int]],
        *,
        safety: float = 4.0,
    ) -> None:
        if not probe or min(len(sequence) for sequence in probe) < 2:
            raise ValueError("the probe needs at least one sequence, and two token ids in each")
        self.probe = [list(sequence) for sequence in probe]
        self._call = call
        self._config = config
        self._safety = safety
        self._dtype = getattr(torch, config.dtype)
        self._timeout = call_timeout(config)
        self._transport = make_transport(call, config)
        self._allowed: tuple[float, float] | None = None
        self._names: tuple[set[str], set[str]] = (set(), set())
        self._parts: Counter[_Part] = Counter()

    def calibrate(self, named_tensors: Mapping[str, Tensor], version: int, score_fn: ScoreFn) -> PushReport:
        """Push once, verify the bytes, and measure the noise that later pushes may show.

        Args:
            named_tensors: as for :meth:`publish`.
            version: as for :meth:`publish`.
            score_fn: as for :meth:`publish`.

        Raises:
            WeightSyncError: as :meth:`publish`, if the engine's checksums leave out a part of a parameter, and
                if the noise is too large to be rounding.
        """
        held: list[ParameterChecksum] = self._engine("checksums")
        self._names = {part.name for part in held if not part.tied_to}, {part.name for part in held}
        self._parts = _parts(held)
        self._check_coverage(named_tensors, held, version)
        report = self._push(named_tensors, version, score_fn)
        limit = _MOST_NOISE[self._config.dtype]
        if not report.noise_mean <= limit:
            raise WeightSyncError(
                f"engine and learner hold the same weights, but their log-probs differ by {report.noise_mean:.2e} "
                f"nats on average, more than {limit:g} (engine.dtype={self._config.dtype}); check that both use the "
                "same model configuration (rotary settings, head tying) and that score_fn works at temperature 1"
            )
        least_mean, least_max = _LEAST_NOISE[self._config.dtype]
        self._allowed = (
            max(self._safety * report.noise_mean, least_mean),
            max(self._safety * report.noise_max, least_max),
        )
        return report

    def publish(self, named_tensors: Mapping[str, Tensor], version: int, score_fn: ScoreFn) -> PushReport:
        """Push the weights, label them ``version`` and verify what the engine computes with.

        Args:
            named_tensors: full tensors under Hugging Face names; a tied ``lm_head.weight`` may be left out.
            version: number of batches the learner has consumed.
            score_fn: the learner's own ``score``: log-prob (nats, temperature 1) of every token but the first of each
                sequence. Called exactly once, with :attr:`probe`, before anything touches the engine: ranks other
                than 0 can join its collectives by calling it once themselves.

        Raises:
            WeightSyncError: with the parameters that differ.
            WeightUpdateError: with the step of the update that failed.
        """
        if self._allowed is None:
            raise RuntimeError(
                "calibrate() comes before the first publish(): without it no noise floor is known"
            )
        report = self._push(named_tensors, version, score_fn)
        allowed_mean, allowed_max = self._allowed
        if not (report.noise_mean <= allowed_mean and report.noise_max <= allowed_max):
            raise WeightSyncError(
                f"version {version}: every parameter arrived, but log-probs of engine and learner differ by "
                f"{report.noise_mean:.2e} nats on average and {report.noise_max:.2e} at most, where the calibrated "
                f"limits are {allowed_mean:.2e} and {allowed_max:.2e}: something outside the parameters is stale (a "
                "cache, a buffer), or the weights have left the range in which the calibration holds"
            )
        return report

    def close(self) -> None:
        """Release the memory or the connection of the transport."""
        self._transport.close()

    def _push(self, named_tensors: Mapping[str, Tensor], version: int, score_fn: ScoreFn) -> PushReport:
        clock = _Clock()
        required, known = self._names
        missing, surplus = sorted(required - set(named_tensors)), sorted(set(named_tensors) - known)
        if missing or surplus:
            raise WeightSyncError(
                f"version {version}: learner and engine hold different models: missing from the push: "
                f"{_listed(missing)}; unknown to the engine: {_listed(surplus)}; nothing was pushed, check engine.model"
            )
        for name, tensor in named_tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise WeightSyncError(f"version {version}: {name} holds NaN or infinity; it is not pushed")
        expected = {name: tensor.detach().to(self._dtype) for name, tensor in named_tensors.items()}
        learner = [[float(value) for value in row] for row in score_fn(self.probe)]
        clock.lap("learner")
        steps = self._transport.send(expected, version)
        clock.lap("transfer")
        self._check_version(version)
        self._check_parameters(expected, version)
        clock.lap("checksum")
        noise = self._noise(learner)
        clock.lap("probe")
        return PushReport(
            version,
            {**clock.seconds, **{f"engine_{name}": value for name, value in steps.items()}},
            float(noise.mean()),
            float(noise.max()),
            sum(tensor.numel() * tensor.element_size() for tensor in expected.values()),
        )

    def _check_coverage(
        self, named_tensors: Mapping[str, Tensor], held: Sequence[ParameterChecksum], version: int
    ) -> None:
        """Every element the engine computes with must be under a checksum, or its arrival is not proven."""
        parts_of: dict[str, list[ParameterChecksum]] = {}
        for part in sorted(held, key=lambda part: part.start):
            parts_of.setdefault(part.name, []).append(part)
        uncovered = []
        for name, parts in parts_of.items():
            tensor = named_tensors.get(name, named_tensors.get(parts[0].tied_to))
            if tensor is None:  # the learner's to push, which is checked next
                continue
            dim = parts[0].dim
            reached = 0
            for part in parts:
                if part.start <= reached and part.dim == dim:
                    reached = max(reached, part.stop)
            if reached != tensor.shape[dim]:
                uncovered.append(f"{name} ({reached} of {tensor.shape[dim]} along dimension {dim})")
        if uncovered:
            raise WeightSyncError(
                f"version {version}: the engine's checksums do not cover {_listed(uncovered)}; nothing was pushed, "
                "check engine.model and that its architecture is a dense decoder"
            )

    def _check_version(self, version: int) -> None:
        reported = self._engine("weight_version")
        if reported != version:
            raise WeightSyncError(
                f"the engine reports version {reported} after a push of version {version}; "
                "is another publisher connected?"
            )

    def _check_parameters(self, expected: Mapping[str, Tensor], version: int) -> None:
        held: list[ParameterChecksum] = self._engine("checksums")
        reported = _parts(held)
        if reported != self._parts:
            missing, surplus = self._parts - reported, reported - self._parts
            raise WeightSyncError(
                f"version {version}: the engine reported other parts of its parameters than at the calibration: "
                f"missing: {_listed(_part_names(missing))}; unexpected: {_listed(_part_names(surplus))}"
            )
        checksum_of = {part.name: part.checksum for part in held}
        differing: list[str] = []
        stale_heads: list[str] = []
        for part in held:
            tensor = expected[part.name if part.name in expected else part.tied_to]
            tensor = tensor.narrow(part.dim, part.start, part.stop - part.start)
            if tensor_checksum(tensor.to(getattr(torch, part.dtype))) == part.checksum:
                continue
            differing.append(part.name)
            if part.tied_to and part.checksum != checksum_of[part.tied_to]:
                stale_heads.append(f"{part.name} (tied to {part.tied_to})")
        if not differing:
            return
        message = (
            f"version {version}: {len(differing)} of {len(held)} parameters in the engine differ from the learner's: "
            f"{_listed(list(dict.fromkeys(differing)))}"
        )
        if stale_heads:
            message += f"; stale tied head: {_listed(stale_heads)} still computes with older weights than its embedding"
        raise WeightSyncError(message)

    def _noise(self, learner: list[list[float]]) -> Tensor:
        engine = self._engine("score", self.probe)
        if [len(row) for row in engine] != [len(row) for row in learner]:
            raise WeightSyncError(
                f"score_fn returned rows of lengths {[len(row) for row in learner]} for a probe that needs "
                f"{[len(row) for row in engine]}: one log-prob for every token but the first"
            )
        difference = torch.tensor(
            [value for row in engine for value in row], dtype=torch.float64
        ) - torch.tensor([value for row in learner for value in row], dtype=torch.float64)
        return difference.abs()

    def _engine(self, method: str, *args: Any) -> Any:
        return self._call(method, *args, timeout=self._timeout)


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name], self._last = now - self._last, now


def _parts(held: Sequence[ParameterChecksum]) -> Counter[_Part]:
    return Counter((part.name, part.dim, part.start, part.stop) for part in held)


def _part_names(parts: Mapping[_Part, int]) -> list[str]:
    return [f"{name}[{start}:{stop}]" for name, _, start, stop in sorted(parts)]


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
