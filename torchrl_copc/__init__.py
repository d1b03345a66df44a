"""COPC: coupled off-policy correction for asynchronous LLM reinforcement learning, as TorchRL parts and a system."""

__version__ = "0.1.0"
