"""Runs inside vLLM's worker in tests only: ways to break a weight push that no production code offers."""

from __future__ import annotations

from torchrl_copc.collectors import vllm_plugin


class SabotageExtension(vllm_plugin.WorkerExtension):
    """The production extension, and a switch that leaves a tied head's packed copy stale."""

    def sabotage_skip_head_repack(self, skip: bool) -> None:
        keep = getattr(self, "_original_repack", vllm_plugin.repack_tied_heads)
        self._original_repack = keep
        vllm_plugin.repack_tied_heads = (lambda model: None) if skip else keep
