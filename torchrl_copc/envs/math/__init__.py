"""Mathematics with a Python interpreter."""

from torchrl_copc.envs.math.data import load_math
from torchrl_copc.envs.math.generated import load_reasoning_gym
from torchrl_copc.envs.math.verify import AnswerVerifier, Verdict, check_gold, verify_answer

__all__ = ["AnswerVerifier", "Verdict", "check_gold", "load_math", "load_reasoning_gym", "verify_answer"]
